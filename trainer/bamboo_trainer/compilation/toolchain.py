"""What torch.compile needs of the machine, beside torch: looked for before it is needed."""

import functools
import os
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from bamboo_core.job.training_spec import TrainingSpec

SECONDS: Final = 60.0  # in which a compiler says its version


class CompilerUnavailable(ValueError):
    """The manifest asks for compiled layers, and something for it is not in this image. The message names the field."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What machine code is made with."""

    version: str  # of what machine code is made with, "" if something lacks
    lacks: str = ""  # what, in words


@functools.cache
def toolchain(*, gpu: bool) -> Toolchain:
    """The compiler of this machine, or what is missing. gpu: it is to compile for a GPU, too."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return Toolchain("", f"Python's headers (Python.h in {sysconfig.get_path('include')})")
    compiler = os.environ.get("CXX") or "g++"
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return Toolchain("", f"a C++ compiler ({compiler})")
    named = said.stdout.partition("\n")[0].strip()
    if not gpu:
        return Toolchain(named)
    try:
        return Toolchain(f"{named}, Triton {version('triton')}")
    except PackageNotFoundError:
        return Toolchain("", "the package triton")


def require_toolchain(training: TrainingSpec, *, gpu: bool) -> None:
    """Raises CompilerUnavailable if layers are to be compiled, and cannot be here."""
    if training.compile and (lacks := toolchain(gpu=gpu).lacks):
        raise CompilerUnavailable(
            f"spec.training.compile: torch.compile needs {lacks}, which is not here; docs/images.md says how an image "
            "gets it"
        )
