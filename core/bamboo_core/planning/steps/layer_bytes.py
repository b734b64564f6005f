"""The memory and traffic of a layer, as a worker counts them."""

from typing import Annotated

import msgspec

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class LayerBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bytes of a layer, in memory and to its neighbour."""

    parameters: Bytes  # with buffers
    optimizer: Bytes  # optimizer state
    gradients: Bytes  # of trained parameters
    activations: Bytes  # kept for a microbatch from its forward to its backward
    boundary: Bytes  # a microbatch's output for the next layer
