"""`bamboo checkpoints` and `bamboo run --resume`: output, refusals and exit codes."""

import json
import re

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.job_source import source_of_file
from bamboo.jobs.here import prepared
from bamboo.local.run_options import LocalRunOptions
from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.job.edits import numbers_digest
from bamboo_core.storage.bounded import StoreLimits
from bamboo_core.storage.local_files import LocalFiles
from checkpoint_kit import layer_bytes, save
from manifest_kit import bamboojob, training


def bamboo(*words, code=0):
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def kept(tmp_path):
    """Return a store's folder and manifests by step. Step 20 lacks a file, 80 has a changed file, 100 no manifest."""
    folder = tmp_path / "run"
    store, files = CheckpointStore(str(folder), StoreLimits(tries=1)), LocalFiles(str(folder))
    manifests = {step: save(store, step) for step in (20, 40, 60, 80)}
    files.delete(manifests[20].place.part(1))
    files.write(manifests[80].place.part(0), [layer_bytes(80, 1)])
    store.write_part(CheckpointId(100, "a"), 0, [b"x"])
    return folder, manifests


def test_a_list_shows_all_there_is(kept):
    folder, manifests = kept
    lines = bamboo("checkpoints", folder).stdout.splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == ["STEP", "AGE", "SIZE", "LAYERS", "STATE", "JOB", "FOLDER"]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[1:]]
    assert [row[0] for row in rows] == ["100", "80", "60", "40", "20"]
    assert rows[0][3:] == ["Unfinished: it was never committed", "step-000000100-a"]
    assert rows[1][3:] == ["2", "Complete", "small", manifests[80].place.folder]
    assert rows[4][4] == "Damaged: layer-00001.safetensors is missing"
    listed = json.loads(bamboo("checkpoints", f"file://{folder}", "-o", "json").stdout)
    assert [one["state"] for one in listed] == ["Unfinished", "Complete", "Complete", "Complete", "Damaged"]
    assert listed[1] | {"bytes": 0} == {
        "folder": manifests[80].place.folder,
        "step": 80,
        "attempt": manifests[80].attempt,
        "state": "Complete",
        "reason": "",
        "bytes": 0,
        "written": manifests[80].created.timestamp(),
        "job": "small",
        "layers": 2,
        "samples": 640,
        "seed": 3,
        "digest": manifests[80].digest,
        "versions": {"bamboo": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
    }


def test_verify_reads_every_file_and_names_the_bad_ones(kept):
    folder, manifests = kept
    lines = bamboo("checkpoints", "--verify", folder, code=1).stdout.splitlines()
    assert len(lines) == 4
    assert lines[0] == (
        f"step 80: {folder}/{manifests[80].place.part(0)} has other contents than were written (its sha256 differs)"
    )
    assert lines[1].startswith(f"step 60: {manifests[60].place.folder} is sound: 2 layers, ")
    assert lines[3] == f"step 20: {folder}/{manifests[20].place.part(1)} is not there"
    assert bamboo("checkpoints", "--verify", folder, "--step", 60).stdout == f"{lines[1]}\n"
    told = json.loads(bamboo("checkpoints", "--verify", folder, "-o", "json", code=1).stdout)
    assert [len(one["problems"]) for one in told] == [1, 0, 0, 1]
    assert bamboo("checkpoints", "--verify", folder, "--step", 61, code=1).stderr == "no checkpoint of step 61\n"


def test_mistakes_get_one_sentence(tmp_path):
    assert bamboo("checkpoints", tmp_path / "nothing").stderr == "no checkpoints\n"
    wrong = bamboo("checkpoints", "s3://key:hunter22@bucket/x", code=2).stderr
    assert wrong.startswith("bamboo: checkpoint URL s3://...@bucket/x: expected one without credentials")
    (tmp_path / "file").touch()
    refused = bamboo("checkpoints", "--verify", tmp_path / "file", code=1).stderr
    assert refused == f"bamboo: cannot list {tmp_path}/file: Not a directory\n"
    assert "expected" in bamboo("export", "ftp://x/y", "-o", tmp_path / "out", code=2).stderr


def test_resume_does_not_begin_anew_because_what_is_there_is_of_another_training(kept, tmp_path):
    """--resume refuses a store that has only checkpoints of another training, but not an empty store."""
    folder, _ = kept
    job = tmp_path / "job.yaml"
    document = bamboojob(task={"entrypoint": "a.b:c"}, training=training(100, 8, 2), topology={"stages": 2})
    job.write_text(json.dumps(document))
    said = bamboo("run", job, "--checkpoints", folder, "--resume", code=2).stderr
    assert said == (
        f"bamboo: --resume: {folder} has no checkpoint of this job; that of step 80 cannot be used: it is of another "
        "training (job small): its task or its training section differs; without --resume it begins at "
        "step 0\n"
    )
    source = source_of_file(str(job))
    save(CheckpointStore(str(folder)), 10, digest=numbers_digest(source.spec))
    for place in (folder, tmp_path / "empty"):
        prepared(source, LocalRunOptions(checkpoints=str(place), resume=True))
