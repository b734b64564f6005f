"""Callbacks of jobs whose workers are killed: in what a callback keeps each call counts once. In real processes, and
without, at every instruction and at every write of the history.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_decisions
import yaml

from bamboo_core.coordinator.events import Outcome
from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord, from_lines
from bamboo_core.planning.plan import ROOT
from bamboo_trainer.callbacks import Callback
from bamboo_trainer.loggers.interface import LoggerFacts
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import check_callbacks
from bamboo_trainer.worker.history.callback_calls import AT_ONCE
from branching_job import kill_at_each, of_role
from manifest_kit import bamboojob, gpt_task, training
from sim_history import kept_by
from stage_kit import small_task
from training_job import Fault, Job

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


class Broken(Callback):
    def on_step(self, step):
        if step.step == 3:
            raise ValueError("broken")


class Strict(Broken):
    fails_job = True


def unhurried(step):
    time.sleep(0.1)
    return 0.01


def build(config):
    made = {"Seen": Seen, "Broken": Broken, "Strict": Strict}
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


@pytest.mark.slow
def test_a_callback_goes_back_with_the_job(tmp_path: Path) -> None:
    """Two neighbours of the only pipeline are killed at once, so steps are repeated; then the job is run once more."""
    url = (tmp_path / "checkpoints").as_uri()
    usual = {
        "checkpoint": {"storage": {"uri": url}, "everySteps": 8},
        "redundancy": {"mode": "None"},
        "standby": {"workers": 0},
    }
    together = ("--preempt", "at:13:0", "--preempt", "at:13:1")
    run(tmp_path, *together, **usual)
    state = kept(tmp_path)["state"]
    numbers = [int(one.split()[2]) for one in state if one.startswith("step")]
    assert numbers == list(range(1, STEPS + 1)), "steps that were done again are there as they were done last"
    assert {one.split()[1] for one in state if one.startswith("step")} == {"1", "2"}
    shutil.rmtree(tmp_path / "out")
    run(tmp_path, **(usual | {"training": training(STEPS + 6, 8, 2)}))
    state = kept(tmp_path)["state"]
    numbers = [int(one.split()[2]) for one in state if one.startswith("step")]
    assert numbers == list(range(1, STEPS + 7))
    assert {"checkpoint 8", f"checkpoint {STEPS}", f"end {STEPS + 6}"} <= set(state)


def test_one_that_fails_is_told_and_training_goes_on(tmp_path: Path) -> None:
    spec = {"topology": {"stages": 2}, "training": training(6, 8, 2), "standby": {"workers": 0}}
    run(tmp_path, callbacks=("Broken", "Seen"), **spec)
    told = [one.message for one in history(tmp_path) if isinstance(one, EventRecord) and one.reason == "CallbackFailed"]
    assert len(told) == 1
    assert "the callback broken, in on_step, of step 3, raised ValueError: broken (" in told[0]
    assert "own_task.py line" in told[0]
    assert len([one for one in kept(tmp_path)["state"] if one.startswith("step")]) == 6


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


class Told(Callback):
    """Keeps all that it was told."""

    def __init__(self, facts: LoggerFacts) -> None:
        super().__init__(facts)
        self.told: list[Any] = []

    def on_step(self, step: StepRecord) -> None:
        self.told.append(["step", step.step, step.loss])

    def on_evaluation(self, evaluation: EvaluationRecord) -> None:
        self.told.append(["evaluation", evaluation.step])

    def on_checkpoint(self, step: int) -> None:
        self.told.append(["checkpoint", step])

    def on_disruption(self, event: EventRecord) -> None:
        self.told.append(["disruption", event.number, event.reason])

    def on_end(self, steps: int) -> None:
        self.told.append(["end", steps])

    def state_dict(self) -> Any:
        return self.told

    def load_state_dict(self, state: Any) -> None:
        self.told = list(state)


def build(config: Mapping[str, Any]) -> Task:
    """With decisions that slow, unfreeze and end the training after the seventh step."""
    return replace(test_decisions.build(config), callbacks={"mine": Told, "other": Told})


def manifest_of(stages: int, pipelines: int) -> dict[str, Any]:
    document = test_decisions.manifest(stages, pipelines, "LazyForward", standby={"workers": 1})
    document["spec"]["task"]["entrypoint"] = "test_callbacks:build"
    return document


def check_told(job: Job) -> list[str]:
    """What both callbacks keep is that each step of the job was told once, in order, and the end last. Returns the
    reasons of disruptions.
    """
    assert job.outcome is Outcome.COMPLETE, (job.finish, job.emitted)
    assert not [emit for emit in job.emitted if emit.reason in ("CallbackFailed", "HistoryNotWritten")]
    losses = list(job.state.progress.losses.values())
    assert len(losses) == 7
    for name in ("mine", "other"):
        told = kept_by(job.history, name).state
        assert [one for one in told if one[0] == "step"] == [["step", n, loss] for n, loss in enumerate(losses, 1)]
        disruptions = [one for one in told if one[0] == "disruption"]
        numbers = [number for _, number, _ in disruptions]
        assert numbers == sorted(set(numbers))
        assert [one for one in told if one not in disruptions][-1] == ["end", 7], "but for workers that wait for others"
        assert told.count(["end", 7]) == 1
    return [reason for _, _, reason in disruptions]


@pytest.mark.parametrize("grid", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_a_kill_at_an_instruction_and_at_every_write_tells_each_step_once(grid: tuple[int, int]) -> None:
    """In the middle of an instruction of a step, and before and after whatever the root writes.

    Of the small grid at one instruction of each kind.
    """
    expected = test_decisions.calm()

    def judge(job: Job) -> list[str]:
        assert test_decisions.ended(job) == expected
        return check_told(job)

    def kill(fault: Fault) -> bool:
        return fault.name == "WriteHistory" or fault.step in ((2, 6) if grid == (2, 2) else (6,))

    def kind(fault: Fault) -> Hashable:
        return fault if fault.name == "WriteHistory" else of_role(fault)

    struck = kill_at_each(manifest_of(*grid), kill, judge, kind if grid == (1, 2) else None)
    writes = [fault for fault in struck if fault.name == "WriteHistory"]
    assert len({fault.step for fault in writes}) >= 10
    assert {"Forward", "ReportReady", "OptimizerStep"} <= {fault.name for fault in struck}
    assert sum("WorkerLost" in reasons for reasons in struck.values()) > len(struck) * 0.8


def test_two_roots_lost_one_after_the_other_leave_each_step_told_once() -> None:
    """Each in the middle of what it writes, the second one as soon as it goes on from the first one's."""
    document = manifest_of(1, 3)
    writes = [fault.step for fault in Job(document).run().executed if fault.name == "WriteHistory"]
    for first in range(1, max(writes), 8):
        for after in (False, True):
            faults = (
                Fault("WriteHistory", ROOT, first, after=after),
                Fault("WriteHistory", ROOT, first + 3, after=not after),
            )
            job = Job(document, faults).run()
            assert not job.faults
            assert test_decisions.ended(job) == test_decisions.calm()
            check_told(job)
