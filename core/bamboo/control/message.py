"""What all messages of the control channel have in common (`protocol`)."""

from typing import Annotated

import msgspec

MOST = 1 << 53  # of what is counted: every reader of JSON knows such a number
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""
