"""The error about an object store's missing package, which names the extra that installs it."""

import pytest

from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.storage.bounded import StorageError


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(
        StorageError, match=r"^s3://bucket/run needs the package s3fs.*pip install 'bamboo-spot\[s3\]'$"
    ):
        CheckpointStore("s3://bucket/run")
