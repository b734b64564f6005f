"""One cache of compiled code for all tests and runs, as users' jobs have one: a layer is compiled once.

It is another one for each state of what compiles: torch, and the code that gives layers to it.
"""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from bamboo_trainer import compilation
from cluster.build import cache_folder


@pytest.fixture(scope="module")
def compiled_cache() -> Iterator[None]:
    sources = sorted(Path(compilation.__path__[0]).glob("*.py"))
    state = [version("torch"), *(path.read_text() for path in sources)]
    digest = hashlib.sha256("\0".join(state).encode()).hexdigest()[:12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / f"compiled-{digest}"))
        yield
