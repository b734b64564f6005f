"""Callbacks of jobs whose workers are killed, in real processes: in what a callback keeps each call counts once.

tests/simulation/ kills workers at every instruction and at every write of the history.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_core.history.records import EventRecord, Record, StepRecord, from_lines
from bamboo_trainer.callbacks import Callback
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import check_callbacks
from bamboo_trainer.worker.history.callback_calls import AT_ONCE
from manifest_kit import bamboojob, gpt_task, training
from stage_kit import small_task

STEPS = 24
TASK = '''\
import dataclasses
import time

from bamboo_trainer.callbacks import Callback
from bamboo_trainer.models import gpt


class Seen(Callback):
    """Keeps its calls, and appends each to a file."""

    def __init__(self, facts):
        super().__init__(facts)
        self.seen = []

    def see(self, what):
        self.seen.append(what)
        with open(self.facts.folder + "/calls", "a") as file:
            file.write(what + "\\n")

    def on_step(self, step):
        self.see(f"step {step.attempt} {step.step} {step.loss!r}")

    def on_checkpoint(self, step):
        self.see(f"checkpoint {step}")

    def on_disruption(self, event):
        self.see(event.reason)

    def on_end(self, steps):
        self.see(f"end {steps}")

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state


class Strict(Callback):
    fails_job = True

    def on_step(self, step):
        if step.step == 3:
            raise ValueError("broken")


def unhurried(step):
    time.sleep(0.1)
    return 0.01


def build(config):
    made = {"Seen": Seen, "Strict": Strict}
    names = config.pop("callbacks")
    task = gpt.build(config)
    if "Strict" in names:
        task = dataclasses.replace(task, learning_rate=unhurried)  # it trains on until the coordinator has heard
    return dataclasses.replace(task, callbacks={name.lower(): made[name] for name in names})
'''


def run(folder: Path, *options: str, callbacks: tuple[str, ...] = ("Seen",), code: int = 0, **spec: Any) -> str:
    """What the run said. Its files are in the folder's `out`."""
    own = gpt_task(dModel=16, context=8)
    usual = {
        "task": {"entrypoint": "own_task:build", "config": {**own["config"], "callbacks": list(callbacks)}},
        "topology": {"stages": 3},
        "standby": {"workers": 1},
        "training": training(STEPS, 8, 2),
    }
    (folder / "own_task.py").write_text(TASK)
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(bamboojob("kept", **(usual | spec))))
    command = [sys.executable, "-m", "bamboo", "run", str(job), "--json", "--output", str(folder / "out"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return done.stdout


def history(folder: Path) -> list[Record]:
    return from_lines((folder / "out" / "history.jsonl").read_bytes(), "history.jsonl")


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(folder.rglob("callback-seen.json")).read_bytes())
    return found


def steps_of(records: list[Record]) -> list[str]:
    return [f"step {one.attempt} {one.step} {one.loss!r}" for one in records if isinstance(one, StepRecord)]


def test_each_call_counts_once_although_roots_are_killed(tmp_path: Path) -> None:
    """The owner of the root cell is killed twice, without notice, in the middle of a step; once another worker is."""
    run(tmp_path, "--preempt", "at:6:0", "--preempt", "at:12:0", "--preempt", "at:17:1")
    state, records = kept(tmp_path)["state"], history(tmp_path)
    assert [one for one in state if one.startswith("step")] == steps_of(records)
    assert len(steps_of(records)) == STEPS
    assert state.count(f"end {STEPS}") == 1
    assert state.index(f"end {STEPS}") > state.index(steps_of(records)[-1])
    lost = [one.reason for one in records if isinstance(one, EventRecord) and one.reason in ("WorkerLost", "Takeover")]
    assert sorted(one for one in state if one in ("WorkerLost", "Takeover")) == sorted(lost)
    assert len(lost) >= 3
    made = next(tmp_path.rglob("calls")).read_text().splitlines()
    assert set(made) == set(state)
    assert len(made) <= len(state) + 2 * AT_ONCE, "what a lost root had not written is called once more"


def test_one_that_may_end_the_job_does(tmp_path: Path) -> None:
    spec = {"topology": {"stages": 2}, "training": training(1000, 8, 2), "standby": {"workers": 0}}
    said = json.loads(run(tmp_path, callbacks=("Strict",), code=1, **spec))
    assert said["reason"] == "CallbackFailed"
    assert "the callback strict, in on_step, of step 3, raised ValueError: broken" in said["message"]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Callback], "Task.callbacks: expected classes or functions by name, which make callbacks, got list"),
        ({"a": 1}, "Task.callbacks: expected classes or functions by name"),
        ({"a/b": Callback}, "Task.callbacks: a name is 'a/b', expected letters, digits, _ and -"),
    ],
)
def test_callbacks_that_are_none_are_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        check_callbacks(small_task(callbacks=callbacks))
