"""What of this process and machine decides the bits of a worker's results."""

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from bamboo.control.platform import Platform
from bamboo.names import DATA_PLANE_VERSION, NUMERICS_VERSION
from bamboo_trainer.memory.placement import DeviceError, choose_device

CPU_INFO = Path("/proc/cpuinfo")
_X86, _ARM = ("vendor_id", "cpu family", "model"), ("CPU implementer", "CPU part")
LONGEST = 256  # characters


def this_platform(worker: str) -> Platform:
    """Of the worker of that name. Not the number of threads, which is always one.

    A device that is not there is left out: the worker says so itself, and ends.
    """
    try:
        device = choose_device(worker)
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    except (DeviceError, RuntimeError):
        gpu = ""
    return Platform(
        data_plane=DATA_PLANE_VERSION,
        numerics=NUMERICS_VERSION,
        torch=str(torch.__version__)[:LONGEST],
        cuda=_cuda() if gpu else "",
        device=(gpu or processor(_cpu_info(), platform.machine()))[:LONGEST],
    )


def processor(info: Mapping[str, str], machine: str) -> str:
    """Its kind, by which libraries choose how they compute; not its clock rate.

    info: what Linux says of the first one.
    """
    named = [info[key] for key in (_X86 if "vendor_id" in info else _ARM) if key in info]
    return " ".join([machine, *named, torch.backends.cpu.get_cpu_capability()])


def _cuda() -> str:
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return str(torch.version.cuda or "") + (f" with cuDNN {cudnn}" if cudnn else "")


def _cpu_info() -> dict[str, str]:
    try:
        first = CPU_INFO.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
