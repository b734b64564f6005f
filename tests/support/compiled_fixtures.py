"""A cache of TorchInductor's compiled code for all tests, runs and checkouts, so that each layer is compiled once.

Each version of torch, and of the module that compiles layers, has its own cache.
"""

import hashlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from bamboo_trainer.stage import compilation
from cluster.build import cache_folder


@pytest.fixture(scope="module")
def compiled_cache() -> Iterator[None]:
    state = [version("torch"), Path(compilation.__file__).read_text()]
    digest = hashlib.sha256("\0".join(state).encode()).hexdigest()[:12]
    folder = cache_folder() / f"compiled-{digest}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        _name_torch_alike(folder, patch)
        yield


def _name_torch_alike(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Give torch's folder the same path in all environments with this version of torch.

    torch's cache finds compiled code by the compiler's command, which contains that folder.
    """
    from torch.utils import cpp_extension

    link = folder / "torch"
    if not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"torch.{os.getpid()}"
        made.symlink_to(Path(torch.__path__[0]), target_is_directory=True)
        made.replace(link)
    patch.setattr(cpp_extension, "_TORCH_PATH", str(link))
    patch.setattr(cpp_extension, "TORCH_LIB_PATH", str(link / "lib"))
