"""Platforms: the software and hardware versions on which the bits of a worker's results depend. Workers of different
platforms may not share a job.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from bamboo_core.planning.plan import Short, WorkerId

UNKNOWN = "an unknown one"
MOST_NAMES: Final = 64  # in a processor's instructions, or in settings
MOST_NAMED: Final = 6  # in a sentence
Names = Annotated[tuple[Short, ...], msgspec.Meta(max_length=MOST_NAMES)]

_LABELS = {
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
    """The software and hardware that a worker computes with. Different platforms may compute different bits."""

    data_plane: int = 0  # names.DATA_PLANE_VERSION
    numerics: int = 0  # names.NUMERICS_VERSION
    torch: Short = ""
    cuda: Short = ""  # and cuDNN's version; "" without CUDA
    driver: Short = ""  # the GPU's
    device: Short = ""  # the GPU's model, or the kind of processor
    capability: Short = ""  # the vector instructions that torch's own CPU kernels use: AVX2, AVX512
    instructions: Names = ()  # of the processor, by which libraries choose kernels; () on a GPU
    threads: int = 0
    settings: Names = ()  # of this process that change how torch computes
    compiler: Short = ""  # for the machine code of compiled layers; "" if there is none


def deciding(platform: Platform, *, compiled: bool) -> Platform:
    """Return the platform, without `compiler` if that cannot affect results. compiled: the job compiles layers."""
    return platform if compiled or not platform.compiler else msgspec.structs.replace(platform, compiler="")


def conflicts(platform: Platform, others: Platform) -> str:
    """Return how a worker's platform differs from the job's (`others`), for a sentence; "" if the worker may join."""
    pairs = ((what, getattr(platform, name), getattr(others, name)) for name, what in _LABELS.items())
    return ", ".join(_difference(*pair) for pair in pairs if pair[1] != pair[2])


def _difference(what: str, own: object, others: object) -> str:
    if isinstance(own, tuple) and isinstance(others, tuple):
        differing = {"with": set(own) - set(others), "without": set(others) - set(own)}
        return f"{what} {' and '.join(f'{how} {_listed(sorted(names))}' for how, names in differing.items() if names)}"
    return f"{what} {own or UNKNOWN} instead of {others or UNKNOWN}"


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join([*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


def most_common(platforms: Mapping[WorkerId, Platform]) -> Platform:
    """Return the most common platform of these workers (at least one); of equally common ones the first."""
    return Counter(platforms.values()).most_common(1)[0][0]
