"""One cache of compiled code for all tests of a run, whichever process runs them: a layer is compiled once."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()  # of each of xdist's processes, in that of the run
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "compiled"))
        yield
