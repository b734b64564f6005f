"""Pretended CUDA devices: GPU code runs on a machine without a GPU, and fails where it would fail on a real GPU.

torch takes them for CUDA devices. Their memory is the host's, and operations run at once, on the CPU, but

- an operation cannot use tensors of two devices, or of a device and the host, except the host's 0-dim tensors;
- a non-blocking copy between pinned memory and a device is made as late as its stream's order allows: when the program
  or another stream waits for it. Until then its target holds NaN. Except on the device's default stream, the copy
  reads its source only then, so a test sees whether the source was overwritten, or freed without `record_stream`;
- a copy from device to device is made as torch makes it, on the stream of the source's device;
- an operation raises RuntimeError if its stream is not ordered after the operations that made its tensors, or after the
  work that was queued on their memory's stream when the memory was allocated. The next operation also raises it after
  the program frees memory that another stream than its own may still use, unless `record_stream` named that stream;
- a device has a default stream and 32 others, which torch hands out in turn;
- an event behind unfinished copies is complete once the program or a stream has waited for it, or the program has
  queried it three times; the time between two events is the time between their records.

They do not reproduce real kernels, the order of their sums, or real time. They have no cuDNN kernels, and so no
recurrent layers. A process gets them only at its start, by the variables of `environment`.
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.build import cache_folder

DEVICES = 4
SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = "c++"
SECONDS = 600.0


def built() -> Path:
    """Build the library and return its path. All checkouts share one build for each source and version of torch.

    Raises CalledProcessError with the compiler's errors.
    """
    torch, flags = _torch(), ["-shared", "-fPIC", "-std=c++20", "-O1"]
    includes = ["-isystem", str(torch / "include"), "-isystem", str(torch / "include/torch/csrc/api/include")]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]  # begin() has loaded them when this one is loaded
    state = [*flags, version("torch"), *(path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]*")))]
    digest = hashlib.sha256("\0".join(state).encode()).hexdigest()[:12]
    library = cache_folder() / f"pretended-gpu-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        try:
            command = [COMPILER, *flags, *includes, str(SOURCE), *libraries, "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
            unfinished.rename(library)
        finally:
            unfinished.unlink(missing_ok=True)
    return library


def environment(library: Path, others: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that give a process and its children pretended GPUs. others: other variables to keep."""
    here, path = SOURCE.parent, others.get("PYTHONPATH", "")
    there = os.pathsep.join(filter(None, (str(here / "start"), str(here.parent), path)))
    return {**others, "PYTHONPATH": there, "PRETENDED_GPU": str(library), "BAMBOO_DEVICE": ""}


def begin(library: Path) -> None:
    """Install the pretended GPUs in this process. It must not have imported torch, whose import looks for GPUs."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    _replace_module(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def _replace_module(library: ctypes.CDLL) -> None:
    """Replace the functions of `torch.cuda` that need a driver."""
    import torch

    for counted in (library.pretended_gpu_allocated, library.pretended_gpu_most_allocated):
        counted.restype = ctypes.c_size_t

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        given = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if given is None else given

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        with stream:
            yield

    class Event:  # a class, as annotations need it, and torch knows no events but its own
        def __new__(cls, enable_timing: bool = False) -> Any:
            return torch.Event(device="cuda", enable_timing=enable_timing)

    instead: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: DEVICES,
        "current_device": index,
        "set_device": lambda device: torch.accelerator.set_device_index(index(device)),
        "device": lambda device: torch.accelerator.device_index(index(device)),
        "Stream": lambda device=None: torch.Stream(device=torch.device("cuda", index(device))),
        "Event": Event,
        "stream": on_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(torch.device("cuda", index(device))),
        "manual_seed": lambda seed: None,  # operations draw from the CPU's generator
        "manual_seed_all": lambda seed: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "a pretended GPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=1 << 34),
        "memory_allocated": lambda device=None: library.pretended_gpu_allocated(index(device)),
        "max_memory_allocated": lambda device=None: library.pretended_gpu_most_allocated(index(device)),
        "reset_peak_memory_stats": lambda device=None: library.pretended_gpu_forget_most(index(device)),
        "memory_reserved": lambda device=None: library.pretended_gpu_allocated(index(device)),
        "mem_get_info": lambda device=None: (1 << 33, 1 << 34),
    }
    for name, value in instead.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.empty_host_cache = lambda: None
