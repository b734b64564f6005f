"""Requirements of torch.compile on the machine in addition to torch, checked before they are needed."""

import functools
import os
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from bamboo_core.job.training_spec import TrainingSpec

SECONDS: Final = 60.0  # limit for a compiler to print its version


class CompilerUnavailable(ValueError):
    """The manifest asks for compiled layers, but this image lacks a requirement. The message names the field."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compiler of machine code."""

    version: str  # the compiler's version, "" if a requirement is missing
    lacks: str = ""  # the missing requirement, in words


@functools.cache
def toolchain(*, gpu: bool) -> Toolchain:
    """Return this machine's compiler, or the missing requirement. gpu: it must compile for a GPU, too."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return Toolchain("", f"Python's headers (Python.h in {sysconfig.get_path('include')})")
    compiler = os.environ.get("CXX") or "g++"
    try:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return Toolchain("", f"a C++ compiler ({compiler})")
    named = output.stdout.partition("\n")[0].strip()
    if not gpu:
        return Toolchain(named)
    try:
        return Toolchain(f"{named}, Triton {version('triton')}")
    except PackageNotFoundError:
        return Toolchain("", "the package triton")


def require_toolchain(training: TrainingSpec, *, gpu: bool) -> None:
    """Raise CompilerUnavailable if layers are to be compiled and cannot be here."""
    if training.compile and (lacks := toolchain(gpu=gpu).lacks):
        raise CompilerUnavailable(
            f"spec.training.compile: torch.compile needs {lacks}, which is not here; docs/images.md says how an image "
            "gets it"
        )
