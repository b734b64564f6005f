"""What a layer takes of memory and of links, as a worker counts it."""

from typing import Annotated

import msgspec

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class LayerBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """parameters: with buffers. optimizer: what it remembers. gradients: of what is trained. activations: what is kept
    of a microbatch from its forward to its backward. boundary: what it gives to the next layer, of a microbatch.
    """

    parameters: Bytes
    optimizer: Bytes
    gradients: Bytes
    activations: Bytes
    boundary: Bytes
