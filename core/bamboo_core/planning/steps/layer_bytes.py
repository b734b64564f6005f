"""What a layer takes of memory and of links, as a worker counts it."""

from typing import Annotated

import msgspec

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class LayerBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bytes of a layer, in memory and to its neighbour."""

    parameters: Bytes  # with buffers
    optimizer: Bytes  # what it remembers
    gradients: Bytes  # of what is trained
    activations: Bytes  # what is kept of a microbatch from its forward to its backward
    boundary: Bytes  # what it gives to the next layer, of a microbatch
