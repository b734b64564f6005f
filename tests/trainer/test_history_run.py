"""A job's history and a callback's state when its workers are killed, with real processes and files: no gaps and no
duplicates.

tests/simulation/ kills workers at any instruction, and at any write of the history.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from bamboo_core.history.files import find
from bamboo_core.history.merge import merged
from bamboo_core.history.records import BEGINNING, EvaluationRecord, EventRecord, Record, StepRecord, from_lines
from bamboo_trainer.worker.followers import AT_ONCE
from manifest_kit import bamboojob, gpt_task, training

STEPS = 24
BUILD = """\
from dataclasses import replace
from bamboo_trainer.models import MODEL


def build(config):
    return replace(MODEL.build(config), loggers={"own": Own}, callbacks=CALLBACKS)


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
CALLBACK = """

from bamboo_trainer.callbacks import Callback


class Seen(Callback):
    def __init__(self, facts):
        super().__init__(facts)
        self.seen = []

    def see(self, what):
        self.seen.append(what)
        with open(self.facts.folder + "/calls", "a") as file:
            file.write(what + "\\n")

    def on_step(self, step):
        self.see(f"step {step.attempt} {step.step} {step.loss!r}")

    def on_disruption(self, event):
        self.see(event.reason)

    def on_end(self, steps):
        self.see(f"end {steps}")

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state
"""


def own_task(folder: Path, logger: str, model: str = "gpt", callback: str = "", **config: Any) -> dict[str, Any]:
    """Write a module with a task: one of Bamboo's models, with its own logger. Return the manifest's `task`.
    logger: the source of the class Own. callback: the source of the class Seen; "" for a task without a callback.
    """
    build = BUILD.replace("MODEL", model).replace("CALLBACKS", '{"seen": Seen}' if callback else "{}")
    (folder / "own_logger.py").write_text(build + logger + callback)
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
    """Check that the records equal the merged records of all roots' files, and contain each event once. A root that
    takes over may repeat records in its own file.
    """
    raw = find(str(folder)).read_all()
    assert list(map(repr, merged(raw))) == list(map(repr, records))
    assert set(map(repr, raw)) == set(map(repr, records))
    numbers = [record.number for record in records if isinstance(record, EventRecord)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_a_history_is_whole_and_each_call_counts_once_although_roots_are_killed(tmp_path: Path) -> None:
    """History and callbacks survive the kill of two roots and of another worker, without notice and within a step."""
    task = own_task(tmp_path, LOGGER, callback=CALLBACK)
    records = run(tmp_path, "--preempt", "at:6:0", "--preempt", "at:12:0", "--preempt", "at:17:1", task=task)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [(record.attempt, record.step) for record in steps] == [(1, step) for step in range(1, STEPS + 1)]
    assert all(record.loss and record.gradient_norm and record.learning_rate for record in steps)
    reasons = [record.reason for record in records if isinstance(record, EventRecord)]
    assert reasons.count("Preempting") == 3
    assert "Complete" in reasons[-2:]
    assert reasons.count("LoggersAwaited") <= 1, "a former root that lives does not log"
    check(tmp_path / "out", records)
    logged = (tmp_path / "out" / "history" / "kept" / "logged").read_text().splitlines()
    numbers = [int(line.split()[1]) for line in logged if line.startswith("StepRecord")]
    assert sorted(set(numbers)) == list(range(1, STEPS + 1)), "the logger has every step, whoever was the root"
    state = json.loads(next(tmp_path.rglob("callback-seen.json")).read_bytes())["state"]
    called = [f"step {one.attempt} {one.step} {one.loss!r}" for one in steps]
    assert [one for one in state if one.startswith("step")] == called
    assert state.count(f"end {STEPS}") == 1
    assert state.index(f"end {STEPS}") > state.index(called[-1])
    lost = [one for one in reasons if one in ("WorkerLost", "Takeover")]
    assert sorted(one for one in state if one in ("WorkerLost", "Takeover")) == sorted(lost)
    assert len(lost) >= 3
    made = next(tmp_path.rglob("calls")).read_text().splitlines()
    assert set(made) == set(state)
    assert len(made) <= len(state) + 2 * AT_ONCE, "what a lost root had not written is called once more"


SLOW_LOGGER = """\
import time


class Own:
    def __init__(self, facts):
        self.path = facts.folder + "/logged"
        self.given = []

    def write(self, records):
        self.given += [f"{type(record).__name__} {record.step}" for record in records if hasattr(record, "step")]

    def close(self):
        time.sleep(8)
        open(self.path, "w").write("\\n".join(self.given))
"""


def test_the_end_waits_for_a_slow_logger_and_the_number_of_a_step_is_one_wherever_a_person_sees_it(
    tmp_path: Path,
) -> None:
    """The job's end waits for a logger that closes slowly; W&B, for one, writes to disk only then."""
    kept = tmp_path / "out" / "history" / "kept"
    trained = training(6, 8, 2, evaluation={"everySteps": 3, "metric": "accuracy"})
    task = own_task(tmp_path, SLOW_LOGGER, "gpt2", size="tiny", evaluation={"samples": 4})
    records = run(tmp_path, task=task, topology={"stages": 2}, training=trained)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [(record.attempt, record.step) for record in steps] == [(1, n) for n in range(1, 7)]
    evaluated = [record for record in records if isinstance(record, EvaluationRecord)]
    assert [(record.attempt, record.step) for record in evaluated] == [(1, 3), (1, 6)]
    assert all(record.loss and record.gradient_norm and record.samples for record in steps)
    events = [record for record in records if isinstance(record, EventRecord)]
    assert events[-1].reason == "LoggersAwaited"
    messages = [event.message for event in events if event.reason == "Evaluated"]
    assert [message.split(":")[0] for message in messages] == ["after step 3", "after step 6"]
    assert (kept / "logged").read_text().splitlines() == [
        *(f"StepRecord {n}" for n in (1, 2, 3)),
        "EvaluationRecord 3",
        *(f"StepRecord {n}" for n in (4, 5, 6)),
        "EvaluationRecord 6",
    ]
    new = list(kept.glob("*.jsonl"))
    assert new
    assert all(file.read_bytes().startswith(BEGINNING) for file in new)
