"""A job's history when its workers are killed: real processes, real files; no gaps and no doubles."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_core.history.files import find
from bamboo_core.history.merge import merged
from bamboo_core.history.records import BEGINNING, EvaluationRecord, EventRecord, Record, StepRecord, from_lines
from manifest_kit import bamboojob, gpt_task, training

STEPS = 24
BUILD = """\
from dataclasses import replace
from bamboo_trainer.models import MODEL


def build(config):
    return replace(MODEL.build(config), loggers={"own": Own})


"""
LOGGER = """\
class Own:
    def __init__(self, facts):
        self.path = facts.folder + "/logged"

    def write(self, records):
        with open(self.path, "a") as file:
            file.writelines(f"{type(record).__name__} {getattr(record, 'step', '')}\\n" for record in records)

    def close(self):
        pass
"""


def own_task(folder: Path, logger: str, model: str = "gpt", **config: Any) -> dict[str, Any]:
    """A model of Bamboo's in a task that brings a logger of its own, whose module is beside the manifest."""
    (folder / "own_logger.py").write_text(BUILD.replace("MODEL", model) + logger)
    return {"entrypoint": "own_logger:build", "config": config or gpt_task(dModel=16, context=8)["config"]}


def run(folder: Path, *options: str, logger: str = LOGGER, code: int = 0, **spec: Any) -> list[Record]:
    usual = {
        "task": spec.get("task") or own_task(folder, logger),
        "topology": {"stages": 3},
        "standby": {"workers": 1},
        "training": training(STEPS, 8, 2),
    }
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(bamboojob("kept", **(usual | spec))))
    command = [sys.executable, "-m", "bamboo", "run", str(job), "--json", "--output", str(folder / "out"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return from_lines((folder / "out" / "history.jsonl").read_bytes(), "history.jsonl")


def check(folder: Path, records: list[Record]) -> None:
    """Each step and each event once, in the files themselves, and in the one that is made of them."""
    raw = find(str(folder)).read_all()
    assert len(raw) == len(merged(raw)) == len(records)
    assert sorted(map(repr, raw)) == sorted(map(repr, records))
    numbers = [record.number for record in records if isinstance(record, EventRecord)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_a_history_is_whole_although_roots_are_killed(tmp_path: Path) -> None:
    """The owner of the root cell is killed twice, without notice, in the middle of a step; once another worker is."""
    records = run(tmp_path, "--preempt", "at:6:0", "--preempt", "at:12:0", "--preempt", "at:17:1")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [(record.attempt, record.step) for record in steps] == [(1, step) for step in range(1, STEPS + 1)]
    assert all(record.loss and record.gradient_norm and record.learning_rate for record in steps)
    reasons = [record.reason for record in records if isinstance(record, EventRecord)]
    assert reasons.count("Preempting") == 3
    assert reasons[-2:] == ["Complete", "LoggersAwaited"], "one waits: who was the root before, and lives, does not log"
    check(tmp_path / "out", records)
    logged = (tmp_path / "out" / "history" / "kept" / "logged").read_text().splitlines()
    numbers = [int(line.split()[1]) for line in logged if line.startswith("StepRecord")]
    assert sorted(set(numbers)) == list(range(1, STEPS + 1)), "the logger has every step, whoever was the root"


SLOW_LOGGER = """\
import time


class Own:
    def __init__(self, facts):
        self.path = facts.folder + "/logged"
        self.given = []

    def write(self, records):
        self.given += [str(record.step) for record in records if hasattr(record, "step")]

    def close(self):
        time.sleep(8)
        open(self.path, "w").write(" ".join(self.given))
"""


def test_the_end_waits_for_a_logger_that_needs_longer_than_workers_have_to_leave(tmp_path: Path) -> None:
    """And says so; W&B, for one, has nothing on disk before it is closed."""
    records = run(tmp_path, logger=SLOW_LOGGER, topology={"stages": 2}, training=training(6, 8, 2))
    assert (tmp_path / "out" / "history" / "kept" / "logged").read_text() == "1 2 3 4 5 6"
    reasons = [record.reason for record in records if isinstance(record, EventRecord)]
    assert reasons[-1] == "LoggersAwaited"


def test_ctrl_c_ends_the_wait_for_a_logger_and_the_job_is_complete(tmp_path: Path) -> None:
    task = own_task(tmp_path, SLOW_LOGGER.replace("time.sleep(8)", "time.sleep(600)"))
    job, training_ = tmp_path / "job.yaml", training(6, 8, 2)
    job.write_text(yaml.safe_dump(bamboojob("kept", task=task, topology={"stages": 2}, training=training_)))
    command = [sys.executable, "-m", "bamboo", "run", str(job), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(280, process.kill)
        watchdog.start()
        said = []
        for line in process.stdout:
            said.append(line)
            if "LoggersAwaited" in line:
                process.send_signal(signal.SIGINT)
        code = process.wait()
        watchdog.cancel()
    assert code == 0, said
    assert any("LoggerIncomplete" in line and "as you asked" in line for line in said), said


UNWRITABLE = "/proc/nowhere/store"  # it can be read as an empty one
IMPATIENT = """\
from bamboo_trainer.models.gpt import build
from bamboo_trainer.worker.history import history_keeper

history_keeper.HELD_SECONDS = 3.0  # instead of 30, for what waits until the history is written
"""


@pytest.mark.parametrize("store", [pytest.param("blocked", marks=pytest.mark.slow), UNWRITABLE])
def test_the_output_has_the_history_of_every_step_whatever_the_store_is(tmp_path: Path, store: str) -> None:
    """One in which the history's place is taken by a file, so that workers cannot write it; an unwritable one. The
    tests above have none.
    """
    url = str(tmp_path / store) if store == "blocked" else store
    task = gpt_task(dModel=16, context=8)
    if store == "blocked":
        (tmp_path / store).mkdir()
        (tmp_path / store / "history").touch()
        (tmp_path / "impatient.py").write_text(IMPATIENT)
        task["entrypoint"] = "impatient:build"
    records = run(tmp_path, "--checkpoints", url, training=training(6, 8, 2), task=task)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [(record.attempt, record.step, record.samples) for record in steps] == [(1, n, 8 * n) for n in range(1, 7)]
    assert all(record.loss and record.gradient_norm and record.learning_rate for record in steps)
    reasons = [record.reason for record in records if isinstance(record, EventRecord)]
    assert reasons[-1] == "Complete", "nothing is waited for where there is no logger"
    assert ("CheckpointStoreNotWritable" in reasons) is (store == UNWRITABLE)


def test_one_number_of_a_step_wherever_a_person_sees_it(tmp_path: Path) -> None:
    kept = tmp_path / "out" / "history" / "kept"
    trained = training(6, 8, 2, evaluation={"everySteps": 3, "metric": "accuracy"})
    task = own_task(tmp_path, LOGGER, "gpt2", size="tiny", evaluation={"samples": 4})
    records = run(tmp_path, task=task, topology={"stages": 2}, training=trained)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [(record.attempt, record.step) for record in steps] == [(1, n) for n in range(1, 7)]
    evaluated = [record for record in records if isinstance(record, EvaluationRecord)]
    assert [(record.attempt, record.step) for record in evaluated] == [(1, 3), (1, 6)]
    assert all(record.loss and record.gradient_norm and record.samples for record in steps)
    events = [record.message for record in records if isinstance(record, EventRecord) and record.reason == "Evaluated"]
    assert [message.split(":")[0] for message in events] == ["after step 3", "after step 6"]
    logged = (kept / "logged").read_text().splitlines()
    assert [line for line in logged if not line.startswith("EventRecord")] == [
        *(f"StepRecord {n}" for n in (1, 2, 3)),
        "EvaluationRecord 3",
        *(f"StepRecord {n}" for n in (4, 5, 6)),
        "EvaluationRecord 6",
    ]
    new = list(kept.glob("*.jsonl"))
    assert new
    assert all(file.read_bytes().startswith(BEGINNING) for file in new)
