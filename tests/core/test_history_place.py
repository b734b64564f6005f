"""Where a job's history is kept."""

from pathlib import Path
from typing import Any

from bamboo_core.history.place import history_url
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import STORAGE_FOLDER
from manifest_kit import bamboojob, training


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
