"""Imports that last as long as the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Around imports: Python's garbage collector does not look through what they make, now or ever.

    torch makes half a million objects. Looking through them takes a second of a worker's start, and later, whenever all
    objects are looked through, a fifth of a second in the middle of a step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
