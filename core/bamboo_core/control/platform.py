"""What decides the bits of a worker's results beside the task, and which workers may therefore be of one job."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from bamboo_core.planning.plan import Short, WorkerId

UNKNOWN = "an unknown one"
MOST_NAMES: Final = 64  # of a processor's instructions, or of settings
MOST_NAMED: Final = 6  # of them in a sentence
Names = Annotated[tuple[Short, ...], msgspec.Meta(max_length=MOST_NAMES)]

_SAID = {
    "data_plane": "data plane version",
    "numerics": "numerics version of Bamboo",
    "torch": "torch",
    "cuda": "CUDA",
    "driver": "GPU driver",
    "device": "device",
    "capability": "torch's kernels on the processor for",
    "instructions": "vector instructions",
    "threads": "number of torch's threads",
    "settings": "settings",
    "compiler": "compiler",
}


class Platform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker computes with; workers that differ in it may come to different bits."""

    data_plane: int = 0  # the version of what workers say to each other
    numerics: int = 0  # names.NUMERICS_VERSION
    torch: Short = ""
    cuda: Short = ""  # with the version of cuDNN, "" without
    driver: Short = ""  # of the GPU
    device: Short = ""  # the GPU's model, or the kind of processor
    capability: Short = ""  # the vector instructions that torch's own kernels use on the processor: AVX2, AVX512
    instructions: Names = ()  # all that it has, which libraries and compilers choose by, where it is the device
    threads: int = 0
    settings: Names = ()  # of this process that change how torch computes
    compiler: Short = ""  # what makes machine code of compiled layers; "" if nothing can


def deciding(platform: Platform, *, compiled: bool) -> Platform:
    """The platform without what decides nothing in a job. compiled: the job's layers are compiled, so that the compiler
    decides, too.
    """
    return platform if compiled or not platform.compiler else msgspec.structs.replace(platform, compiler="")


def conflicts(platform: Platform, others: Platform) -> str:
    """Return why a worker of that platform cannot join a job whose workers have the other one; "" if it can."""
    pairs = ((what, getattr(platform, name), getattr(others, name)) for name, what in _SAID.items())
    return ", ".join(_difference(*pair) for pair in pairs if pair[1] != pair[2])


def _difference(what: str, own: object, others: object) -> str:
    if isinstance(own, tuple) and isinstance(others, tuple):
        found = {"with": set(own) - set(others), "without": set(others) - set(own)}
        return f"{what} {' and '.join(f'{how} {_listed(sorted(names))}' for how, names in found.items() if names)}"
    return f"{what} {own or UNKNOWN} instead of {others or UNKNOWN}"


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join([*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


def most_common(platforms: Mapping[WorkerId, Platform]) -> Platform:
    """The platform that most of these workers have, of which there is one at least; if two have as many, the first."""
    return Counter(platforms.values()).most_common(1)[0][0]
