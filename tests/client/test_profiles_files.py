"""Profiles in files: shipped ones, users' own, and unreadable ones."""

from pathlib import Path

import pytest

from bamboo.profiles import files
from bamboo.profiles.files import read_profile, shipped_names
from bamboo_core.planning.profile import ProfileError


def test_a_file_is_read_like_one_that_comes_with_bamboo(tmp_path: Path) -> None:
    name = shipped_names()[0]
    own = tmp_path / "own.json"
    own.write_bytes((files.FOLDER / f"{name}.json").read_bytes())
    assert read_profile(str(own)) == read_profile(name)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfileError, match=rf"no-such: .*a name may be one of {shipped_names()[0]}"):
        read_profile("no-such")
    with pytest.raises(ProfileError, match=r"Is a directory$"):
        read_profile(str(tmp_path))
    monkeypatch.setattr(files, "MOST_BYTES", 2**20)
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ProfileError, match="more than 1 MiB"):
        read_profile(str(large))
