"""Checks of output files before a long command begins. Every command imports this, so it imports nothing slow."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from bamboo.cli.dispatch import usage

STANDARD_OUTPUT = Path("-")


def _file(path: Path | None) -> Path | None:
    """Return a flag's path; None for -, which is standard output."""
    return None if path == STANDARD_OUTPUT else path


Written = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=_file,
        help="File to write; - is standard output.",
        show_default="standard output",
    ),
]


def check_output_file(flag: str, path: Path | None) -> None:
    """End the command with a usage error if the file cannot be written. path: None for standard output."""
    if path is None:
        return
    check_is_path(flag, path, "a file")
    if path.is_dir():
        usage(f"{flag}: expected a file, and {path} is a folder")
    if not path.parent.is_dir():
        usage(f"{flag}: cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        usage(f"{flag}: cannot write {path}: Permission denied")


def check_plot(flag: str, path: Path | None) -> None:
    """End the command if the plot's file cannot be written or matplotlib is not installed. path: None for no plot."""
    check_output_file(flag, path)
    if path is not None and find_spec("matplotlib") is None:
        usage(f"{flag} needs matplotlib, not installed here; pip install 'bamboo-spot[plots]' installs it")


def check_is_path(flag: str, path: Path, expected: str) -> None:
    """End the command if the path is `-` (standard output). expected: the valid kind of path, such as "a folder"."""
    if path == STANDARD_OUTPUT:
        usage(f"{flag} -: expected {expected}, not standard output")
