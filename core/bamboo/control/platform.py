"""What decides the bits of a worker's results beside the task, and which workers may therefore be of one job."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from bamboo.planning.plan import Short, WorkerId

UNKNOWN = "an unknown one"
_SAID = {
    "data_plane": "data plane version",
    "numerics": "numerics version of Bamboo",
    "torch": "torch",
    "cuda": "CUDA",
    "device": "device",
}


class Platform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """data_plane: the version of what workers say to each other. numerics: names.NUMERICS_VERSION.

    cuda: with the version of cuDNN, "" without. device: the GPU's model, or the kind of processor.
    """

    data_plane: int = 0
    numerics: int = 0
    torch: Short = ""
    cuda: Short = ""
    device: Short = ""


def conflicts(platform: Platform, others: Platform, *, mixed: bool) -> str:
    """Why a worker of that platform cannot be of a job whose workers have the other one; "" if it can.

    mixed: the job's workers may give different bits. They have to understand each other all the same.
    """
    names = ("data_plane",) if mixed else tuple(_SAID)
    found = [
        f"{_SAID[name]} {getattr(platform, name) or UNKNOWN} instead of {getattr(others, name) or UNKNOWN}"
        for name in names
        if getattr(platform, name) != getattr(others, name)
    ]
    return ", ".join(found)


def most_common(platforms: Mapping[WorkerId, Platform]) -> Platform:
    """Of these workers, of which there is one at least; of the first one if there are as many of another."""
    return Counter(platforms.values()).most_common(1)[0][0]
