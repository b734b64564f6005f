"""Imports that last as long as the process."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch looks at it when it makes the first tensor


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Around imports: Python's garbage collector does not look through what they make, now or ever.

    torch makes half a million objects. Looking through them takes a second of a worker's start, and later, whenever all
    objects are looked through, a fifth of a second in the middle of a step.

    torch is told, unless somebody has told it something else, to ask for huge pages for tensors from 2 MiB on: memory
    that is written for the first time is handed over in pages, and with small ones that takes ten times as long as to
    write to it.
    """
    os.environ.setdefault(HUGE_PAGES, "1")
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
