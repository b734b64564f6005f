"""The versions of the code that writes a checkpoint here, for its manifest."""

import platform
from importlib.metadata import version

import torch

from bamboo_core.checkpoint.manifest import Versions


def versions() -> Versions:
    return Versions(bamboo=version("bamboo-spot-core"), torch=str(torch.__version__), python=platform.python_version())
