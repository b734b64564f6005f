"""The scripts in docs/coming-from.md and the jobs beside them train with the same losses, step by step."""

import csv
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import RandomSampler

from bamboo_core.history.records import EventRecord, StepRecord, from_lines
from bamboo_core.planning.plan import Cell
from bamboo_trainer.data import sample_numbers
from folders import ROOT
from titan_model import LENGTH, WORDS
from training_job import Fault, Job, check_same_bits

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
SHOWN = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
STEPS, BATCH, SAMPLES = 12, 8, 100
Script = Callable[[Path], list[float]]
pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that others bring
KILLED = Fault("Backward", Cell(0, 1), 6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new current folder with the page's files; scripts that shuffle there get a job's order of samples."""
    for name, text in SHOWN.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(RandomSampler, "__iter__", as_a_job_draws_them)
    torch.manual_seed(0)
    return tmp_path


def as_a_job_draws_them(sampler: RandomSampler) -> Iterator[int]:
    for step in range(STEPS):
        yield from sample_numbers(0, step * BATCH, BATCH, len(sampler.data_source))


def trainer(folder: Path) -> list[float]:
    import transformers
    from datasets import Dataset

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_hidden_layers=2, vocab_size=WORDS
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH)).tolist()
    Dataset.from_dict({"input_ids": tokens, "labels": tokens}).save_to_disk(folder / "tokens")
    history = runpy.run_path("trainer_script.py")["trainer"].state.log_history
    return [row["loss"] for row in history if "loss" in row]


def lightning(folder: Path) -> list[float]:
    runpy.run_path("lightning_script.py")
    (metrics,) = folder.rglob("metrics.csv")
    with metrics.open() as lines:
        return [float(row["loss"]) for row in csv.DictReader(lines)]


def torchtitan(folder: Path) -> list[float]:
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape) < 0.1] = -100
    np.savez(folder / "tokens.npz", tokens=tokens[:, :-1].numpy(), labels=labels.numpy())
    return list(runpy.run_path("torchtitan_script.py")["losses"])


def job(name: str, *faults: Fault, **topology: int) -> Job:
    document = yaml.safe_load(Path(f"{name}.yaml").read_text())
    document["spec"]["topology"] |= topology
    return Job(document, faults).run()


def losses(job: Job) -> list[float | None]:
    return list(job.state.progress.losses.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "pipelines", "bits"), [(trainer, 2, False), (lightning, 1, True), (torchtitan, 2, False)]
)
def test_a_script_and_its_job_have_the_same_losses(script: Script, pipelines: int, bits: bool, folder: Path) -> None:
    """Losses are bit-equal if script and job sum in the same order: without clipping, with one microbatch per step."""
    theirs = script(folder)
    calm, killed = job(script.__name__), job(script.__name__, KILLED, pipelines=pipelines)
    assert calm.finish is not None
    assert len(theirs) == len(losses(calm)) == STEPS
    assert len(set(theirs)) == STEPS
    assert losses(calm) == theirs if bits else losses(calm) == pytest.approx(theirs, rel=1e-6)
    check_same_bits(calm, killed)


@pytest.mark.slow
def test_the_job_of_trainer_has_them_with_real_processes_and_one_killed(folder: Path) -> None:
    theirs = trainer(folder)
    command = [sys.executable, "-m", "bamboo", "run", "trainer.yaml", "--output", "trained", "--preempt", "at:6:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    records = from_lines((folder / "trained" / "history.jsonl").read_bytes(), "history.jsonl")
    assert [one.loss for one in records if isinstance(one, StepRecord)] == pytest.approx(theirs, rel=1e-6)
    assert "Preempting" in [one.reason for one in records if isinstance(one, EventRecord)]
