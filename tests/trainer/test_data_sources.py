"""Where the files of a data set are."""

import os

import fsspec
import pytest

from bamboo_trainer.data import CacheConfig, open_sources


def test_the_default_folder_for_blocks_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("BAMBOO_DATA_CACHE", raising=False)
    (folder := CacheConfig.default().folder).mkdir(mode=0o755)
    assert folder == tmp_path / f"bamboo-data-{os.geteuid()}"
    files = fsspec.filesystem("memory")
    files.pipe_file("/claimed/a.bin", b"x")
    open_sources("memory://claimed", (".bin",))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is not a folder of this user"):
        open_sources("memory://claimed", (".bin",))
    files.rm("/claimed", recursive=True)
