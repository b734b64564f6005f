"""The local runner without processes: replacement of workers, and nodes that come and go."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo.local import runner
from bamboo.local.runner import RunOptions, run_job
from bamboo.local.scheduling import Room, Schedule
from bamboo.local.views.summary import Summary
from bamboo.terminal.view import CombinedView, StopJob, UserRequest
from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelEvent, Received, WorkerJoined
from bamboo_core.coordinator.events import Status
from manifest_kit import bamboojob, training
from run_view_kit import source

SECONDS = 60.0  # that a test waits for something


def manifest(stages: int, **spec: Any) -> dict[str, Any]:
    task = {"entrypoint": "ending:build"}
    return bamboojob("tiny", **{"task": task, "training": training(10, 4, 2), "topology": {"stages": stages}, **spec})


class Run(CombinedView):
    """A run without processes: its fork server, its control server, and its view.

    Joined workers follow messages at once. ends(): ends a worker. dies: whether a killed worker ends. The clock stands
    still.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.ticks, self.dies = 1000.0, 0, True
        self.started: list[str] = []
        self.alive: tuple[str, ...] = ()
        self.signals: list[tuple[str, int]] = []
        self.shown: Status | None = None
        self.exited: Callable[[str, int | None], None] = lambda worker, code: None
        self.tell: Callable[[ChannelEvent], None] = lambda event: None
        self.request: Callable[[UserRequest], None] = lambda request: None

    # the fork server

    def fork_server(self, exited: Callable[[str, int | None], None], log: Path, **settings: Any) -> Any:
        self.exited = exited
        return self._named(
            open=_nothing, close=_nothing, start=self._start, signal=self._signal, crashed_at=_no_text, tail=_no_text
        )

    def _named(self, **parts: Any) -> Any:
        return type("Stand", (), {**{k: staticmethod(v) for k, v in parts.items()}, "alive": property(self._alive)})()

    def _alive(self, _: object) -> tuple[str, ...]:
        return self.alive

    def _start(self, worker: str, gate: Sequence[int] = (), **arguments: str | None) -> None:
        self.started.append(worker)
        self.alive = (*self.alive, worker)

    def _signal(self, worker: str, number: int) -> None:
        self.signals.append((worker, number))
        if number == signal.SIGKILL and self.dies:
            self.ends(worker, -number)

    def ends(self, worker: str, code: int | None) -> None:
        if worker in self.alive:
            self.alive = tuple(one for one in self.alive if one != worker)
            self.exited(worker, code)

    # the control server

    def control_server(self, tell: Callable[[ChannelEvent], None], authenticate: object, heartbeat: float) -> Any:
        self.tell = tell

        async def start() -> str:
            return "ws://nowhere"

        return SimpleNamespace(start=start, stop=_nothing, send=self._obey)

    def _obey(self, worker: str, message: protocol.Message) -> None:
        match message:
            case protocol.ProfileRequest():
                self.hear(worker, protocol.Profile(costs=(1.0,) * 4))
            case protocol.SendPlan(plan=plan):
                self.hear(worker, protocol.PlanApplied(epoch=plan.epoch))
                for cell in plan.cells():
                    if plan.at(cell).owner == worker:
                        for replica in plan.at(cell).replicas:
                            self.hear(worker, protocol.ReplicaSynced(cell=cell, replica=replica))
            case protocol.Stop():
                self.ends(worker, 0)

    def hear(self, worker: str, message: protocol.Message) -> None:
        self.tell(Received(worker, message))

    def joins(self, worker: str, *, ready: bool = True) -> None:
        self.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1)))
        if ready:
            self.hear(worker, protocol.WorkerReady())

    # the view

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self.request = request

    def status(self, status: Status) -> None:
        self.ticks, self.shown = self.ticks + 1, status

    # what happens

    async def trains(self) -> None:
        await self.until(lambda: len(self.started) > 1)
        for worker in self.started:
            self.joins(worker)
        await self.until(lambda: self.shown is not None and self.shown.phase == "Running" and self._protected())

    def _protected(self) -> bool:
        return self.shown is not None and all(protected for row in self.shown.grid for _, protected in row)

    async def some_ticks(self) -> None:
        seen = self.ticks
        await self.until(lambda: self.ticks > seen + 3)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.001)


async def _nothing(*_: object) -> None: ...


def _no_text(*_: object) -> str:
    return ""


Running = tuple[Run, "asyncio.Task[Summary]"]


@asynccontextmanager
async def running(
    folder: Path, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], **options: Any
) -> AsyncIterator[Running]:
    """Start a run, yield it and its task, and stop it in the end."""
    run = Run()
    monkeypatch.setattr(runner, "ForkServer", run.fork_server)
    monkeypatch.setattr(runner, "ControlServer", run.control_server)
    monkeypatch.setattr(runner, "AwakeClock", lambda: lambda: run.now)
    monkeypatch.setattr(runner, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(runner, "DRAIN_SECONDS", 0.1)
    task = asyncio.create_task(run_job(source(document), RunOptions(output=folder, **options), run))
    try:
        yield run, task
    finally:
        if not task.done():
            run.request(StopJob())
        await task


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("trains", [False, True])
async def test_whoever_is_lost_is_replaced_after_that_time_also_before_the_job_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, trains: bool
) -> None:
    async with running(tmp_path, monkeypatch, manifest(2), replace_after=seconds) as (run, _):
        await run.until(lambda: run.started)
        assert run.started == ["w0", "w1"], "the first ones need not wait"
        if trains:
            await run.trains()
        else:
            run.joins("w0", ready=False)
        run.ends("w0", -signal.SIGKILL)
        await run.some_ticks()
        assert ("w2" in run.started) is (seconds == 0)


async def test_nodes_come_while_a_job_cannot_begin_for_want_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording stands still while workers start on the nodes that exist."""
    rooms = (Room(at=0.0, nodes=1, notice=False), Room(at=10.0, nodes=2, notice=False))
    async with running(tmp_path, monkeypatch, manifest(2), preempt=Schedule(rooms=rooms)) as (run, _):
        await run.some_ticks()
        run.now += 60.0
        await run.some_ticks()
        assert run.started == ["w0"], "it has yet to start"
        run.joins("w0")
        await run.some_ticks()
        run.now += 9.0
        await run.some_ticks()
        assert run.started == ["w0"]
        run.now += 2.0
        await run.some_ticks()
        assert run.started == ["w0", "w1"]


async def test_a_job_ends_with_a_recording_that_leaves_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = (Room(at=0.0, nodes=2, notice=False), Room(at=10.0, nodes=0, notice=False))
    async with running(tmp_path, monkeypatch, manifest(2), preempt=Schedule(rooms=rooms)) as (run, task):
        await run.trains()
        run.dies = False
        run.now += 11.0
        await run.some_ticks()
        assert {worker for worker, number in run.signals if number == signal.SIGKILL} == {"w0", "w1"}
        assert not task.done(), "they are still there"
        for worker in run.alive:
            run.ends(worker, -signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            summary = await task
    assert (summary.reason, summary.message) == (
        "RecordingOver",
        "the recording of nodes is over, and none is left at its end; 0 of 10 steps are done",
    )
