"""`bamboo init`: its files are valid, load, and pass their test; wrong answers are refused."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import bamboo
from bamboo.cli.commands import app

MODEL = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    return tmp_path


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


def test_a_model_of_ones_own_gets_a_task_a_manifest_and_a_test_that_passes(folder: Path) -> None:
    done = init("my-net", "--model", "net.py:Net", "--data", "text.txt", "--checkpoints", "kept")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("written: my-net.yaml, test_my_net.py, my_net_task.py; then\n")
    job = bamboo.Job.from_file("my-net.yaml")
    assert job.spec.checkpoint is not None
    assert job.spec.checkpoint.storage == (folder / "kept").as_uri()
    assert job.spec.task.config["data"] == {"kind": "text", "path": str(folder / "text.txt"), "length": 128}
    runpy.run_path("test_my_net.py")["test_a_lost_worker_changes_no_bit"]()
    again = init("my-net", "--model", "net.py:Net", "--data", "text.txt")
    assert (again.exit_code, "my-net.yaml and test_my_net.py and my_net_task.py: already there" in again.stderr) == (
        2,
        True,
    )
    assert init("my-net", "--model", "net.py:Net", "--data", "text.txt", "--force").exit_code == 0


def test_a_published_model_needs_no_code(folder: Path) -> None:
    (folder / "bert").mkdir()
    assert init("here", "--model", "bert", "--data", "text.txt").exit_code == 0
    document: Any = yaml.safe_load((folder / "here.yaml").read_text())
    assert document["spec"]["task"]["entrypoint"] == "bamboo_trainer.models.huggingface:build"
    assert document["spec"]["task"]["config"]["model"] == "bert"
    assert not (folder / "here_task.py").exists()
    done = init("hub", "--model", "openai-community/gpt2", "--data", "text.txt")
    assert "save openai-community/gpt2 into hub-model" in done.stdout
    assert bamboo.Job.from_file("hub.yaml").spec.task.config["model"] == "hub-model"


def test_a_job_for_a_cluster_names_an_image_and_grows_with_the_nodes() -> None:
    given = ["--model", "net.py:Net", "--data", "text.txt", "--checkpoints", "s3://bucket/far"]
    done = init("far", *given, "--where", "cluster")
    assert done.exit_code == 0, done.output
    spec = bamboo.Job.from_file("far.yaml").spec
    assert spec.elastic is not None
    assert (spec.worker.image, spec.elastic.max_workers, spec.topology.chooses_stages) == ("your/image", 4, True)
    assert done.stdout.index("your image") < done.stdout.index("bamboo submit far.yaml")
    assert "bamboo run" not in done.stdout
    assert "bamboo submit" not in init("near", *given, "--where", "here").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Bad_", "--model", "net.py:Net", "--data", "text.txt"], "metadata.name: expected a DNS-1123 label"),
        (["ok", "--model", "zzz", "--data", "text.txt"], "--model 'zzz': expected the folder of a model"),
        (["ok", "--model", "other.py:Net", "--data", "text.txt"], "--model other.py:Net: there is no other.py in this"),
        (["ok", "--model", "net.py:Net", "--data", "gone"], "gone: No such file or directory"),
        (["ok", "--data", "text.txt"], "--model: expected it, since there is no terminal"),
        (["ok", "--model", "net.py:Net", "--data", "text.txt", "--where", "moon"], "--where 'moon': expected here or"),
        (["ok", "--model", "net.py:Net", "--data", "text.txt", "--checkpoints", "ftp://x"], "spec.checkpoint.storage"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(arguments: list[str], said: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    done = init(*arguments)
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("path", "files", "kind"),
    [
        ("x", {"x": b"BAMBOOTK"}, "tokens"),
        ("x", {"x/0.tokens": b"BAMBOOTK"}, "tokens"),
        ("x.npz", {"x.npz": b"PK"}, "npz"),
        ("x", {"x/dataset_info.json": b"{"}, "huggingface"),
        ("x", {"x/a/1.png": b"", "x/b.bin": b""}, None),
    ],
)
def test_the_kind_of_data_is_told_by_what_is_there(path: str, files: dict[str, bytes], kind: str | None) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    done = init("job", "--model", "net.py:Net", "--data", path)
    if kind is None:
        assert (done.exit_code, "expected a file of tokens" in done.stderr) == (2, True)
    else:
        assert bamboo.Job.from_file("job.yaml").spec.task.config["data"]["kind"] == kind
