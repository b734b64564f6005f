"""The files of a history: their names, their place, and the removal of a killed writer's partial files."""

from pathlib import Path
from typing import Any

from bamboo_core.history.files import HistoryFile, HistoryFiles, file_of, history_url
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import STORAGE_FOLDER
from manifest_kit import bamboojob, training


def test_names_sort_as_they_were_begun():
    files = [HistoryFile(2, 1, 0), HistoryFile(1, 12, 3), HistoryFile(1, 9, 10)]
    assert sorted(file.name for file in files) == [file.name for file in sorted(files)]
    assert [file_of(file.name) for file in files] == files
    assert file_of("000001-0000000001-000000.jsonl.partial") is None


def test_what_a_killed_writer_has_left_is_removed_once_nobody_can_be_writing_it(tmp_path: Path) -> None:
    files = HistoryFiles(str(tmp_path))
    names = [".000001-0000000001-000000.jsonl.0a1b2c3d.partial", ".notes.0a1b2c3d.partial", "own"]
    for name in names:
        (tmp_path / name).touch()
    files.remove_partial(older=600.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    files.remove_partial(older=0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
    HistoryFiles(str(tmp_path / "nowhere")).remove_partial(older=0.0)


def spec(**more: Any) -> JobSpec:
    return parse_manifest(
        bamboojob(task={"entrypoint": "m:b"}, training=training(1, 2, 1), topology={"stages": 1}, **more)
    )


def test_beside_the_checkpoints_or_in_the_folder_of_the_run_or_nowhere() -> None:
    plain = spec()
    name = plain.name
    assert history_url(plain) == ""
    assert history_url(plain, Path("/tmp/run")) == f"file:///tmp/run/history/{name}"
    stored = spec(checkpoint={"storage": "s3://bucket/x/"})
    assert history_url(stored, Path("/tmp/run")) == f"s3://bucket/x/history/{name}"
    assert history_url(stored, Path("/tmp/run"), stored=False) == f"file:///tmp/run/history/{name}"
    assert history_url(stored, stored=False) == f"s3://bucket/x/history/{name}"
    claimed = spec(checkpoint={"storage": "pvc://disk"})
    assert history_url(claimed) == f"{STORAGE_FOLDER}/{name}/checkpoints/history/{name}"
