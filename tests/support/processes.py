"""A job with real worker processes, which a test disturbs by faults inside the workers or by signals."""

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

import faulty_worker
import paced
from bamboo.local.fork_server import ForkServer
from bamboo_core.control.protocol import WorkerJoined
from bamboo_core.control.server import ControlServer, token_check
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import (
    AddWorkers,
    Emit,
    Event,
    Finish,
    RemoveWorker,
    Send,
    Tick,
    WorkerLost,
)
from bamboo_core.job.manifest import parse_manifest
from folders import TASK_PATH
from played_job import PlayedJob

TICK_SECONDS = 0.05
Decide = Callable[["Processes"], None]


class Processes(PlayedJob):
    """A job with real worker processes. main: their program, "module:function". decide: called after each event."""

    def __init__(
        self, manifest: Mapping[str, Any], folder: Path, *, main: str | None = None, decide: Decide = lambda job: None
    ) -> None:
        self.manifest, self.folder, self.main, self.decide = dict(manifest), folder, main, decide
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self.token, self.url = secrets.token_hex(8), ""
        self.pool = ForkServer(self.exited, folder / "workers.log")
        self.per_node = parse_manifest(manifest).spread.workers_per_node
        self.started = 0  # workers
        self.emitted: list[Emit] = []
        self.acted: list[str] = []
        self.frozen: set[str] = set()
        self.exits: dict[str, int | None] = {}
        self.finish: Finish | None = None
        self.state = coordinator.initial(
            parse_manifest(manifest),
            self.manifest,
            secret=secrets.token_hex(8),
            now=time.monotonic(),
        )

    async def run(self, seconds: float = 100.0) -> "Processes":
        server = ControlServer(self.queue.put_nowait, token_check(self.token))
        await self.pool.open()
        ticking = asyncio.create_task(self._ticks())
        try:
            self.url = await server.start()
            async with asyncio.timeout(seconds):
                while self.finish is None:
                    self._step(await self.queue.get(), server)
                    self.decide(self)
                while self.pool.alive and not self._only_frozen():
                    self._step(await self.queue.get(), server)  # late joiners are told that the job is over
        except TimeoutError:
            raise AssertionError(f"no end after {seconds} s: {self.emitted[-8:]}\n{self.pool.tail(40)}") from None
        finally:
            ticking.cancel()
            await server.stop()
            await self.pool.close()
        return self

    def _only_frozen(self) -> bool:
        return self.frozen.issuperset(self.pool.alive)

    def owner(self, pipeline: int, stage: int) -> str:
        assert self.state.plan is not None
        return self.state.plan.pipelines[pipeline][stage].owner

    def signal(self, worker: str, number: int = signal.SIGKILL) -> None:
        self.acted.append(worker)
        if number == signal.SIGSTOP:
            self.frozen.add(worker)
        self.pool.signal(worker, number)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.queue.put_nowait(Tick())

    def exited(self, worker: str, code: int | None) -> None:
        self.exits[worker] = code
        self.queue.put_nowait(WorkerLost(worker, f"exit code {code}", code))

    def _located(self, event: Event) -> Event:
        """Return the event, with the node of a joining worker if several workers share a node (`per_node`)."""
        if not isinstance(event, WorkerJoined) or self.per_node == 1:
            return event
        node = f"node-{int(event.hello.worker[1:]) // self.per_node}"
        return WorkerJoined(msgspec.structs.replace(event.hello, node=node))

    def _step(self, event: Event, server: ControlServer) -> None:
        self.state, commands = coordinator.step(self.state, self._located(event), time.monotonic())
        for command in commands:
            match command:
                case Send(worker, message):
                    server.send(worker, message)
                case AddWorkers(count):
                    for _ in range(count):
                        worker, self.started = f"w{self.started}", self.started + 1
                        self.pool.start(worker, url=self.url, token=self.token, zone="", main=self.main)
                case RemoveWorker(_):
                    pass  # it leaves by itself: that is a part of what is tested
                case Emit():
                    self.emitted.append(command)
                case Finish():
                    self.finish = command


def run(
    manifest: Mapping[str, Any], folder: Path, decide: Decide = lambda job: None, *, seconds: float = 100.0
) -> Processes:
    return asyncio.run(Processes(manifest, folder, decide=decide).run(seconds))


def run_slowly(
    manifest: Mapping[str, Any],
    folder: Path,
    monkeypatch: Any,
    decide: Decide,
    *,
    since: int,
    until: Callable[[Processes], bool],
) -> Processes:
    """Train slowly from step `since` until `until` returns True, so that `decide` acts in time on any machine."""
    mark = folder / "slow"
    mark.touch()
    monkeypatch.setenv("PYTHONPATH", TASK_PATH, prepend=os.pathsep)

    def decide_and_look(job: Processes) -> None:
        decide(job)
        if until(job):
            mark.unlink(missing_ok=True)

    return run(paced.slowed(manifest, mark, since), folder, decide_and_look)


def run_with_faults(
    manifest: Mapping[str, Any],
    folder: Path,
    monkeypatch: Any,
    *faults: tuple[str, int, int, int, int, int],
    seconds: float = 100.0,
) -> Processes:
    """Run a job with faults (instruction, pipeline, stage, step, microbatch, signal); check that each one strikes."""
    marks = folder / "marks"
    marks.mkdir()
    monkeypatch.setenv(faulty_worker.ENVIRONMENT, json.dumps({"marks": str(marks), "faults": faults}))
    monkeypatch.setenv("PYTHONPATH", TASK_PATH, prepend=os.pathsep)
    job = asyncio.run(Processes(manifest, folder, main="faulty_worker:main").run(seconds))
    assert len(list(marks.iterdir())) == len(faults), "a fault did not strike"
    return job
