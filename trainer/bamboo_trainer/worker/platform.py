"""Facts of this process and machine that affect the bits of a worker's results."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from bamboo_core.control.platform import MOST_NAMES, Platform
from bamboo_core.names import DATA_PLANE_VERSION, NUMERICS_VERSION
from bamboo_trainer.memory.gpus import DeviceError, choose_device
from bamboo_trainer.stage.compilation import toolchain

CPU_INFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
LONGEST = 256  # characters

_X86, _ARM = ("vendor_id", "cpu family", "model"), ("CPU implementer", "CPU part")
_VECTORS: Final = ("avx", "amx", "fma", "f16c", "sse4")  # prefixes of such flags on x86; on ARM all are reported
# Variables that change how torch, cuBLAS, cuDNN, MKL, oneDNN or the compiler compute, or which kernels they choose.
_VARIABLES: Final = re.compile(
    "NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|TORCH_BLAS_PREFER_.+|CUBLAS(LT)?_WORKSPACE_(CONFIG|SIZE)|"
    "CUDNN_.+|MKL_(CBWR|ENABLE_INSTRUCTIONS|DEBUG_CPU_TYPE)|(ONEDNN|DNNL)_(MAX_CPU_ISA|DEFAULT_FPMATH_MODE|CPU_ISA_HINTS)|"
    "TORCH_MKLDNN_MATMUL_MIN_DIM|TORCHINDUCTOR_(?!.*(CACHE|THREADS|WORKER)).+"
)


def this_platform(worker: str) -> Platform:
    """Return the versions, hardware and settings of this process that can change the bits of results. worker: the name
    that selects one of several GPUs. If the chosen device is missing, describe the CPU; the worker fails later.
    """
    try:
        device = choose_device(worker)
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    except (DeviceError, RuntimeError):
        gpu = ""
    info = _cpu_info()
    return Platform(
        data_plane=DATA_PLANE_VERSION,
        numerics=NUMERICS_VERSION,
        torch=str(torch.__version__)[:LONGEST],
        cuda=_cuda() if gpu else "",
        driver=_driver() if gpu else "",
        device=(gpu or processor(info, platform.machine()))[:LONGEST],
        capability=torch.backends.cpu.get_cpu_capability(),
        instructions=() if gpu else instructions(info),
        threads=torch.get_num_threads(),
        settings=settings(os.environ),
        compiler=toolchain(gpu=bool(gpu)).version[:LONGEST],
    )


def processor(info: Mapping[str, str], machine: str) -> str:
    """Return the CPU's architecture, vendor, family and model, by which math libraries choose their kernels.

    info: the fields of the first processor in /proc/cpuinfo. machine: the architecture.
    """
    named = [info[key] for key in (_X86 if "vendor_id" in info else _ARM) if key in info]
    return " ".join([machine, *named])


def instructions(info: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the processor's instruction sets that can change results, sorted. A virtual machine may hide
    some.
    """
    flags = info["flags"].split() if "flags" in info else []
    names = [*(flag for flag in flags if flag.startswith(_VECTORS)), *info.get("Features", "").split()]
    return tuple(sorted(set(names)))[:MOST_NAMES]


def settings(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings of torch and its libraries that can change results, as sorted texts. Call it before the
    task's code is loaded.
    """
    flags = {
        f"fp32 products {torch.get_float32_matmul_precision()}": True,
        "TF32 in cuDNN": torch.backends.cudnn.allow_tf32,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "no oneDNN": not torch.backends.mkldnn.enabled,
    }
    variables = [f"{name}={value}"[:LONGEST] for name, value in environment.items() if _VARIABLES.fullmatch(name)]
    return tuple(sorted([*(flag for flag, on in flags.items() if on), *variables]))[:MOST_NAMES]


def driver(text: str) -> str:
    """Return the driver's version from the text of /proc/driver/nvidia/version; "" if there is none."""
    match = re.search(r"Kernel Module\D*?(?:x86_64|aarch64)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def _driver() -> str:
    try:
        named = driver(NVIDIA_DRIVER.read_text())
    except OSError:
        named = ""
    if named or torch.version.hip:
        return named
    version = getattr(
        torch._C, "_cuda_getDriverVersion", lambda: 0
    )()  # of the driver's interface, if the kernel module names no version
    return f"for CUDA {version // 1000}.{version % 1000 // 10}"


def _cuda() -> str:
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return str(torch.version.cuda or torch.version.hip or "") + (f" with cuDNN {cudnn}" if cudnn else "")


def _cpu_info() -> dict[str, str]:
    try:
        first = CPU_INFO.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
