"""How much memory the processes of a run have in use at most: looked at now and then, from outside."""

import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bamboo_core.orphans import children

SAMPLE_SECONDS = 0.5
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
NVIDIA_SECONDS = 20.0
MIB = 1 << 20


class MemoryUnknown(RuntimeError):
    """Nobody says how much memory is in use; one sentence."""


@dataclass(slots=True)
class MemorySampler:
    """highest: bytes in use at most beyond those at the beginning, of a device or of a process. problem: why that is
    not known, a sentence.
    """

    highest: int = 0
    problem: str = ""


@contextmanager
def sampled(*, gpu: bool) -> Iterator[MemorySampler]:
    """Looks until its end. Raises MemoryUnknown if it cannot."""
    sampler, over = MemorySampler(), threading.Event()
    before = gpu_bytes() if gpu else ()

    def look() -> None:
        while not over.wait(SAMPLE_SECONDS):
            try:
                now = [used - then for used, then in zip(gpu_bytes(), before, strict=True)] if gpu else private_bytes()
            except MemoryUnknown as error:
                sampler.problem = str(error)
                return
            sampler.highest = max([sampler.highest, *now])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield sampler
    finally:
        over.set()
        thread.join()


def gpu_bytes() -> tuple[int, ...]:
    """The bytes in use of each GPU. Raises MemoryUnknown."""
    try:
        said = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=NVIDIA_SECONDS)
        return tuple(int(line) * MIB for line in said.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise MemoryUnknown(f"nvidia-smi does not say how much memory is in use: {error}") from None


def private_bytes() -> list[int]:
    """The bytes of each worker that it shares with no other process."""
    return [
        sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
        for lines in _rollups(grandchildren())
    ]


def _rollups(processes: Iterable[int]) -> Iterator[list[str]]:
    for process in processes:
        try:
            yield Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has just ended


def grandchildren() -> list[int]:
    """The workers: a child of this process has forked them, and has torch's own memory, which they share."""
    found = list[int]()
    for child in children():
        try:
            said = Path(f"/proc/{child}/task/{child}/children").read_text()
        except OSError:
            continue  # it has just ended
        found += map(int, said.split())
    return found
