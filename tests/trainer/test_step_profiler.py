"""torch.profiler in chosen steps: its files, its spans, what is told of them, and that training is the same."""

import gzip
import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_core.control.protocol import Message, WorkerWarning
from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.training_spec import ProfilerSpec
from bamboo_core.planning.plan import Cell
from bamboo_trainer.telemetry import step_profiler
from bamboo_trainer.telemetry.step_profiler import StepProfiler, TraceWriter, is_chosen
from folders import TASK_PATH
from manifest_kit import bamboojob, gpt_task, training
from processes import run, run_with_faults

CELL = Cell(0, 1)
OF_TENSORBOARD = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")  # torch_tb_profiler.consts.WORKER_PATTERN


class Engine:
    """What an engine does for one cell, and what it tells; it is its own observer behind the profiler's."""

    def __init__(self, folder: Path, wanted: ProfilerSpec, url: str = "") -> None:
        self.told: list[Message] = []
        self.passed_on: list[tuple[str, object]] = []
        files = TraceWriter(url or folder.as_uri(), "w2", self.told.append)
        self.profiler = StepProfiler(self, wanted, "w2", torch.device("cpu"), lambda: "what comes", files)
        self.layer = torch.nn.Linear(4, 4)

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.passed_on.append((name, step))

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.passed_on.append((name, step))

    def event(self, name: str, **facts: object) -> None:
        self.passed_on.append((name, facts))

    def runs(self, step: int, microbatches: int = 2, cell: Cell = CELL) -> None:
        self.does("ReplicaUpdate", step - 1, 0, cell)
        for name in ("Forward", "Backward"):
            for microbatch in range(microbatches):
                self.profiler.event("Idle")
                self.does("RedundantForward", step, microbatch, Cell(0, 2))
                self.does(name, step, microbatch, cell)
        self.does("OptimizerStep", step, 0, cell)

    def does(self, name: str, step: int, microbatch: int, cell: Cell) -> None:
        self.profiler.started(name, cell, step, microbatch)
        self.layer(torch.ones(2, 4))
        self.profiler.finished(name, cell, step, microbatch)

    def ends(self) -> None:
        self.profiler.end()
        done: list[bool] = []
        self.profiler.when_written(lambda: done.append(True))
        self.profiler.close(60.0)
        assert done


def spans(file: Path) -> list[str]:
    """The names of the spans in a file, as Perfetto would show them, in their order."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def warnings(told: Sequence[Message]) -> list[tuple[str, str]]:
    return [(one.reason, one.message) for one in told if isinstance(one, WorkerWarning)]


def test_each_chosen_step_is_a_file_with_the_engines_instructions(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ProfilerSpec(first_step=3, last_step=4))
    engine.profiler.prepare()
    for step in range(6):
        engine.runs(step)
    where = f"2 files w2.STEP.pt.trace.json.gz in {tmp_path}"
    while not engine.told:  # long before the job's end
        time.sleep(0.01)
    assert warnings(engine.told) == [("ProfilerWritten", f"steps 3 to 4: {where}")]
    engine.ends()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["w2.3.pt.trace.json.gz", "w2.4.pt.trace.json.gz"]
    for file, step in zip(files, (3, 4), strict=True):
        named = OF_TENSORBOARD.match(file.name)
        assert named is not None
        assert named.groups() == ("w2", f".{step}")
        forwards = [f"Forward for stage 1 of pipeline 0, step {step}, microbatch {m}" for m in (0, 1)]
        found = spans(file)
        assert found[0] == f"ProfilerStep#{step}"
        assert [one for one in found if one.startswith("Forward")] == forwards
        assert found[found.index(forwards[0]) + 1 :][:3] == [
            "Wait for what comes",
            f"RedundantForward for stage 2 of pipeline 0, step {step}, microbatch 1",
            "Wait for what comes",  # goes on after what was done meanwhile
        ]
        assert f"OptimizerStep for stage 1 of pipeline 0, step {step}, microbatch 0" in found
        operations = [event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
        assert operations.count("aten::linear") == 10, "up to the next step's first instruction"
    assert len(engine.told) == 1


def test_all_is_passed_on_as_if_there_were_no_profiler(tmp_path: Path) -> None:
    engine, silent = Engine(tmp_path, ProfilerSpec(first_step=1, last_step=2)), Engine(tmp_path, NEVER)
    for one in (engine, silent):
        for step in range(3):
            one.runs(step)
        one.ends()
    assert engine.passed_on == silent.passed_on
    assert warnings(silent.told) == []


NEVER = ProfilerSpec(first_step=50, last_step=51)


def test_a_step_of_many_operations_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profiler, "MOST_EVENTS", 60)
    engine = Engine(tmp_path, ProfilerSpec(first_step=2, last_step=3))
    for step in range(4):
        engine.runs(step, microbatches=40)
    engine.ends()
    for step in (2, 3):
        file = tmp_path / f"w2.{step}.pt.trace.json.gz"
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert 5 < sum(event.get("cat") in ("cpu_op", "user_annotation") for event in events) < 120
    ((reason, text),) = warnings(engine.told)
    assert (reason, text.split(":")[0]) == ("ProfilerWritten", "steps 2 to 3, of each at most 60 events")


def test_steps_after_a_checkpoint_are_recorded_again_and_a_repeated_one_is_not(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ProfilerSpec(first_step=2, last_step=4))
    for step in (0, 1, 2):
        engine.runs(step)
    engine.does("Forward", 1, 0, Cell(0, 2))  # repeated for a lost worker
    engine.ends()
    assert sorted(file.name[3] for file in tmp_path.iterdir()) == ["2", "3"]
    again = Engine(tmp_path, ProfilerSpec(first_step=2, last_step=4))
    for step in (0, 1, 2, 3, 1, 2):  # back to the checkpoint of step 1
        (tmp_path / f"w2.{step + 1}.pt.trace.json.gz").unlink(missing_ok=True)
        again.runs(step)
    again.ends()
    assert len(spans(tmp_path / "w2.2.pt.trace.json.gz")) > 5, "whole, not what was repeated of it"
    assert sorted(file.name[3] for file in tmp_path.iterdir()) == ["2", "3", "4"]


def test_a_profiler_that_cannot_start_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ProfilerSpec(first_step=1, last_step=4))
    with torch.profiler.profile(acc_events=True) as own:
        engine.profiler.prepare()
        for step in range(4):
            engine.runs(step)
    assert len(own.events()) > 0, "the task's own goes on"
    assert [name for name, _ in engine.passed_on].count("OptimizerStep") == 8
    ((reason, text),) = warnings(engine.told)
    assert (reason, text) == ("ProfilerFailed", "torch.profiler cannot start: the task's code has one that runs")
    assert not list(tmp_path.iterdir())


def test_a_place_that_takes_no_files_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = Engine(tmp_path, ProfilerSpec(first_step=1, last_step=3), (tmp_path / "file").as_uri())
    for step in range(4):
        engine.runs(step)
    engine.ends()
    ((reason, text),) = warnings(engine.told)
    assert reason == "ProfilerFailed"
    assert text.startswith("what torch.profiler recorded is not written: cannot write ")


@pytest.mark.parametrize(
    ("wanted", "worker", "chosen"),
    [
        ({}, "w0", True),
        ({"stage": 1}, "w0", True),
        ({"stage": 0}, "w0", False),
        ({"pipeline": 0, "stage": 1}, "w0", True),
        ({"pipeline": 1}, "w0", False),
        ({"worker": "w3"}, "w3", True),
        ({"worker": "w3"}, "quickstart-w3", True),
        ({"worker": "3"}, "quickstart-w3", True),
        ({"worker": "quickstart-w3"}, "quickstart-w3", True),
        ({"worker": "w3"}, "quickstart-w33", False),
        ({"worker": "w3", "stage": 0}, "w3", False),
    ],
)
def test_workers_are_chosen_by_name_stage_and_pipeline(wanted: dict[str, Any], worker: str, *, chosen: bool) -> None:
    assert is_chosen(ProfilerSpec(first_step=1, last_step=1, **wanted), worker, CELL) is chosen


@pytest.mark.slow
def test_a_job_with_a_profiler_and_a_loss_trains_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is lost in the middle of a step that is recorded; its own file of that step is, and no other one."""
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)

    def manifest(**more: Any) -> dict[str, Any]:
        return bamboojob(
            task=gpt_task(blocks=2),
            training=training(7, 8, 2, **more),
            topology={"stages": 2, "pipelines": 2},
            standby={"workers": 1},
        )

    files = tmp_path / "files"
    for folder in ("plain", "profiled"):
        (tmp_path / folder).mkdir()
    plain = run(manifest(), tmp_path / "plain")
    wanted = {"firstStep": 3, "lastStep": 7, "pipeline": 0, "to": files.as_uri()}
    job = run_with_faults(
        manifest(profiler=wanted),
        tmp_path / "profiled",
        monkeypatch,
        ("Backward", 0, 0, 4, 0, signal.SIGKILL),
    )
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.progress.losses == plain.state.progress.losses
    assert dict(job.state.ending.finished) == dict(plain.state.ending.finished)
    there = {file.name.removesuffix(".pt.trace.json.gz") for file in files.iterdir()}
    lost = next(worker for worker, code in job.exits.items() if code == -signal.SIGKILL)
    assert {name for name in there if name.startswith(f"{lost}.")} == {f"{lost}.3", f"{lost}.4"}
    assert {name.split(".")[1] for name in there if not name.startswith(f"{lost}.")} == {"3", "4", "5", "6", "7"}
    told = [emit.message for emit in job.emitted if emit.reason == "ProfilerWritten"]
    assert {text.split(":")[0] for text in told} == {name.split(".")[0] for name in there} - {lost}
    assert all(text.endswith(f".STEP.pt.trace.json.gz in {files}") for text in told)
