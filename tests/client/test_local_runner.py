"""How local workers ended, heard of before or after their links broke; and jobs whose workers end again and again."""

import signal
from pathlib import Path
from typing import Any

import pytest

from bamboo.local.fork_server import ForkServer
from bamboo.local.runner import RunOptions, _LocalRun
from bamboo.preemption.scheduling import Room, Schedule
from bamboo.terminal.view import QuietView, TakeWorker
from bamboo_core.control import protocol
from bamboo_core.control.channel_events import ChannelClosed, Received, WorkerJoined
from bamboo_core.coordinator.events import Event, Tick, WorkerLost
from bamboo_core.job.manifest import parse_manifest
from manifest_kit import bamboojob, training

NINE = {"name": "nine", "onExitCodes": [9], "action": "FailJob"}


def manifest(stages: int, **spec: Any) -> dict[str, Any]:
    task = {"entrypoint": "ending:build"}
    return bamboojob("tiny", **{"task": task, "training": training(10, 4, 2), "topology": {"stages": stages}, **spec})


class Run(_LocalRun):
    """One without processes, whose workers are known by what they say."""

    def __init__(
        self, folder: Path, document: dict[str, Any], *, replace_after: float = 0.0, preempt: Schedule | None = None
    ) -> None:
        options = RunOptions(replace_after=replace_after, preempt=preempt or Schedule())
        super().__init__(parse_manifest(document), document, options, QuietView(), folder)
        self.told: list[WorkerLost] = []

    def trains(self) -> "Run":
        workers = [f"w{n}" for n in range(self._spec.topology.stages)]
        self._pool.start = lambda worker, *_, **__: None  # type: ignore[method-assign]
        for worker in workers:
            self._handle(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1)))
            self.hear(worker, protocol.WorkerReady())
        self.hear("w0", protocol.Profile(costs=(1.0,) * 4))
        plan = self._state.plan
        assert plan is not None
        for worker in workers:
            self.hear(worker, protocol.PlanApplied(epoch=plan.epoch))
        for cell in plan.cells():
            for replica in plan.at(cell).replicas:
                self.hear(plan.at(cell).owner, protocol.ReplicaSynced(cell=cell, replica=replica))
        return self

    def hear(self, worker: str, message: protocol.Message) -> None:
        self._handle(Received(worker, message))

    def miss(self, worker: str) -> None:
        self.hear("w0", protocol.PeerDown(peer=worker))
        self._handle(ChannelClosed(worker))
        assert worker in self._workers._removed

    def ends(self, worker: str, code: int | None) -> "Run":
        self._exited(worker, code)
        event: Event = self._events.get_nowait()
        assert isinstance(event, WorkerLost)
        self.told.append(event)
        self._handle(event)
        return self


@pytest.mark.parametrize("missed_first", [True, False])
@pytest.mark.parametrize(
    ("code", "policy", "reason"),
    [
        (9, {"backoffLimit": 0, "rules": [NINE]}, "FailurePolicy"),
        (-signal.SIGSEGV, {"backoffLimit": 0}, "BackoffLimitExceeded"),
        (-signal.SIGKILL, {"backoffLimit": 0}, "BackoffLimitExceeded"),
        (0, {"backoffLimit": 0}, "BackoffLimitExceeded"),
        (9, {"backoffLimit": 1}, None),
    ],
)
async def test_a_worker_that_ended_by_itself_is_judged_whichever_is_heard_first(
    tmp_path: Path, missed_first: bool, code: int, policy: dict[str, Any], reason: str | None
) -> None:
    run = Run(tmp_path, manifest(4, failurePolicy=policy)).trains()
    if missed_first:
        run.miss("w1")
    run.ends("w1", code)
    assert (run._finish.reason if run._finish else None) == reason
    assert run._state.ends.restarts == (reason != "FailurePolicy")
    assert run._workers.crashes == ([] if code == 0 else [run.told[0].worker + " " + run.told[0].detail])


async def test_a_worker_that_this_run_has_killed_has_not_ended_by_itself(tmp_path: Path) -> None:
    """Because it was missed and did not go, or to see what happens."""
    run = Run(tmp_path, manifest(4, failurePolicy={"backoffLimit": 0})).trains()
    run.miss("w1")
    run._workers.kill("w1")
    run.ends("w1", -signal.SIGKILL)
    run._request(TakeWorker("w3", notice=False))
    run.ends("w3", -signal.SIGKILL)
    assert [(lost.exit_code, lost.removed) for lost in run.told] == [(None, True), (None, False)]
    assert (run._finish, run._state.ends.restarts, run._workers.crashes) == (None, 0, [])
    assert {worker: end.disrupted for worker, end in run._state.ends.since_commit.items()} == {"w1": False, "w3": True}


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("trains", [False, True])
async def test_whoever_is_lost_is_replaced_after_that_time_also_before_the_job_trains(
    tmp_path: Path, seconds: float, trains: bool
) -> None:
    run = Run(tmp_path, manifest(2), replace_after=seconds)
    started: list[str] = []
    run._pool.start = lambda worker, *_, **__: started.append(worker)  # type: ignore[method-assign]
    run._handle(Tick())
    assert started == ["w0", "w1"], "the first ones need not wait"
    if trains:
        run.trains()
        run._pool.start = lambda worker, *_, **__: started.append(worker)  # type: ignore[method-assign]
    else:
        run._handle(WorkerJoined(protocol.Hello(worker="w0", host="h", port=1)))
    run.ends("w0", -signal.SIGKILL)
    run._handle(Tick())
    assert ("w2" in started) is (seconds == 0)
    assert len(run._timers) == (seconds > 0)
    for timer in run._timers:
        timer.cancel()


async def test_workers_are_started_as_there_are_nodes_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = (Room(at=0.0, nodes=1, notice=False), Room(at=10.0, nodes=2, notice=False))
    run = Run(tmp_path, manifest(2), preempt=Schedule(rooms=rooms))
    started: list[str] = []
    monkeypatch.setattr(ForkServer, "start", lambda pool, worker, *_, **__: started.append(worker))
    monkeypatch.setattr(ForkServer, "alive", property(lambda pool: started))
    run._handle(Tick())
    assert started == ["w0"]
    run._recorded_since = run._now() - 11.0
    run._handle(Tick())
    assert started == ["w0", "w1"]


async def test_nodes_come_while_a_job_cannot_begin_for_want_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not while those workers start for which there are nodes, which may take a while."""
    rooms = (Room(at=0.0, nodes=1, notice=False), Room(at=10.0, nodes=2, notice=False))
    run = Run(tmp_path, manifest(2), preempt=Schedule(rooms=rooms))
    started: list[str] = []
    monkeypatch.setattr(ForkServer, "start", lambda pool, worker, *_, **__: started.append(worker))
    monkeypatch.setattr(ForkServer, "alive", property(lambda pool: started))
    clock = run._now()
    run._now = lambda: clock  # type: ignore[assignment]
    run._handle(Tick())
    clock += 60.0
    run._handle(Tick())
    assert started == ["w0"], "it has yet to start"
    run._handle(WorkerJoined(protocol.Hello(worker="w0", host="h", port=1)))
    run.hear("w0", protocol.WorkerReady())
    clock += 9.0
    run._handle(Tick())
    assert started == ["w0"]
    clock += 2.0
    run._handle(Tick())
    assert started == ["w0", "w1"]


async def test_a_job_ends_with_a_recording_that_leaves_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = (Room(at=0.0, nodes=2, notice=False), Room(at=10.0, nodes=0, notice=False))
    run = Run(tmp_path, manifest(2), preempt=Schedule(rooms=rooms)).trains()
    alive = ["w1"]
    monkeypatch.setattr(ForkServer, "alive", property(lambda pool: alive))
    run._recorded_since = run._now() - 11.0
    run._handle(Tick())
    assert run._finish is None, "a worker that has had its notice is still there"
    alive.clear()
    run._handle(Tick())
    assert run._finish is not None
    assert (run._finish.reason, run._finish.message) == (
        "RecordingOver",
        "the recording of nodes is over, and none is left at its end; 0 of 10 steps are done",
    )
