"""What it takes for a file on this machine to be there after a loss of power, too."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """To the disk: a file's content, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
