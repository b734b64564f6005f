"""Imports that last as long as the process."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it makes the first tensor


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Exclude the objects that imports inside this context make from Python's garbage collection, now and later.

    torch makes half a million objects. Traversing them takes a second of a worker's start, and later, at each full
    collection, a fifth of a second in the middle of a step.

    Unless the environment sets it, torch is also set to ask for huge pages for tensors from 2 MiB on: the kernel
    provides new memory in pages, and with small pages that takes ten times as long as writing to it.
    """
    os.environ.setdefault(HUGE_PAGES, "1")
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
