"""Whether what a long command is to write can be written, looked at before it begins. Imported with its flags."""

import os
from importlib.util import find_spec
from pathlib import Path

from bamboo.cli.dispatch import usage


def check_output_file(flag: str, path: Path | None) -> None:
    """A mistake ends the command."""
    if path is None:
        return
    if path.is_dir():
        usage(f"{flag}: expected a file, and {path} is a folder")
    if not path.parent.is_dir():
        usage(f"{flag}: cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        usage(f"{flag}: cannot write {path}: Permission denied")


def check_plot(flag: str, path: Path | None) -> None:
    """The same for a picture."""
    check_output_file(flag, path)
    if path is not None and find_spec("matplotlib") is None:
        usage(f"{flag} needs matplotlib, not installed here; pip install 'bamboo[plots]' installs it")
