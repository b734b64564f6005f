"""Runs a BambooJob on this machine: the coordinator's local shell.

One queue of events, one loop: every event goes through `coordinator.step`, every command is carried out at once.
"""

import asyncio
import contextlib
import json
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bamboo import coordinator
from bamboo.events import (
    AddWorkers,
    Command,
    Emit,
    Event,
    Finish,
    Interrupted,
    Notice,
    Outcome,
    Received,
    RemoveWorker,
    Send,
    Tick,
    WorkerLost,
)
from bamboo.local.pool import Pool, PoolError, exit_detail
from bamboo.local.preempt import NOTICE_SECONDS, Schedule, due, victim
from bamboo.local.summary import Summary, summarize
from bamboo.local.view import Quit, Take, View, Wish
from bamboo.names import HEARTBEAT_TIMEOUT_SECONDS
from bamboo.plan import WorkerId
from bamboo.protocol import StepCommitted
from bamboo.server import Server, token_check
from bamboo.spec import JobSpec
from bamboo.status import status

TICK_SECONDS = 0.05
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
DRAIN_SECONDS = 3.0  # for the workers to leave when the job is over
ZONES = ("zone-a", "zone-b", "zone-c")
SAMPLE = "bamboo_trainer.sample:sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """output: folder for weights and logs. trace: file for the merged trace. undisturbed: nobody may take workers."""

    preempt: Schedule = field(default_factory=Schedule)
    output: Path | None = None
    trace: Path | None = None
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT_SECONDS
    undisturbed: bool = False


async def run_job(spec: JobSpec, manifest: dict[str, Any], options: Options, view: View) -> Summary:
    """Runs the job to its end and leaves no process. Raises PoolError if no worker can be started at all."""
    with tempfile.TemporaryDirectory(prefix="bamboo-") as scratch:
        return await _Run(spec, manifest, options, view, Path(scratch)).run()


class _Run:
    def __init__(self, spec: JobSpec, manifest: dict[str, Any], options: Options, view: View, scratch: Path) -> None:
        self._spec, self._manifest, self._options, self._view = spec, manifest, options, view
        self._folder = options.output.absolute() if options.output else scratch
        self._traces = scratch / "traces"
        self._traces.mkdir()
        self._token = secrets.token_hex(16)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._server = Server(
            self._events.put_nowait, token_check(self._token), heartbeat=2 * options.heartbeat_timeout
        )
        self._url = ""
        task_module = spec.task.entrypoint.partition(":")[0]
        imports = [task_module] if task_module.startswith("bamboo_trainer.") else []
        self._pool = Pool(self._exited, self._folder / "workers.log", imports=imports)
        self._state = coordinator.initial(
            spec,
            manifest,
            secret=secrets.token_hex(16),
            save_path=str(self._folder / "weights"),
            now=time.monotonic(),
            heartbeat_timeout=options.heartbeat_timeout,
        )
        self._preempt = options.preempt
        self._taken: set[WorkerId] = set()
        self._removed: set[WorkerId] = set()
        self._number = 0
        self._finish: Finish | None = None
        self._training_since: float | None = None
        self._training_ended = 0.0
        self._timers: list[asyncio.TimerHandle] = []
        self._task: asyncio.Task[Any] | None = None
        self._interrupted = False
        self._closing = False

    async def run(self) -> Summary:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._task = asyncio.current_task()
        sample = None
        with self._signals():
            try:
                self._view.start(self._wish)
                await self._pool.open()
                self._url = await self._server.start()
                await self._drive()
                await self._drain()
                sample = await self._sample()
            except asyncio.CancelledError:
                if not self._interrupted:
                    raise
                # NB: the finish that the coordinator decided before the deadline stands
                self._finish = self._finish or Finish(Outcome.INTERRUPTED, "Interrupted", "stopped by the user")
            finally:
                await self._close()
        return self._summary(sample)

    # events

    async def _drive(self) -> None:
        ticker = asyncio.create_task(self._tick_for_ever())
        try:
            while self._finish is None:
                self._handle(await self._events.get())
        finally:
            ticker.cancel()

    async def _drain(self) -> None:
        """Lets the workers leave; those that do not are killed by close()."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._pool.alive and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                self._handle(await asyncio.wait_for(self._events.get(), left))

    async def _tick_for_ever(self) -> None:
        while True:
            self._events.put_nowait(Tick())
            await asyncio.sleep(TICK_SECONDS)

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        self._state, commands = coordinator.step(self._state, event, now)
        for command in commands:
            self._execute(command)
        if self._state.phase == "Running" and self._training_since is None:
            self._training_since = now
        committed = isinstance(event, Received) and isinstance(event.message, StepCommitted)
        if committed:
            self._training_ended = now
        if committed or isinstance(event, Tick):
            self._preempt_due(now)
            self._view.status(status(self._state, now))

    def _exited(self, worker: WorkerId, code: int | None) -> None:
        self._events.put_nowait(WorkerLost(worker, exit_detail(code), code))

    # commands

    def _execute(self, command: Command) -> None:
        match command:
            case Send(worker, message):
                self._server.send(worker, message)
            case AddWorkers(count):
                self._add(count)
            case RemoveWorker(worker):
                self._remove(worker)
            case Emit():
                self._view.emit(command)
            case Finish():
                self._finish = self._finish or command

    def _add(self, count: int) -> None:
        for _ in range(count):
            worker = f"w{self._number}"
            zone = ZONES[self._number % len(ZONES)]
            self._number += 1
            trace = str(self._traces / f"{worker}.json") if self._options.trace else None
            try:
                self._pool.start(worker, url=self._url, token=self._token, zone=zone, trace=trace)
            except PoolError as error:
                self._finish = self._finish or Finish(Outcome.FAILED, "LauncherLost", str(error))
                return

    def _remove(self, worker: WorkerId) -> None:
        if worker not in self._removed:
            self._removed.add(worker)
            self._pool.signal(worker, signal.SIGTERM)
            self._later(GRACE_SECONDS, worker)

    def _later(self, seconds: float, worker: WorkerId) -> None:
        """SIGKILL after that time, if the worker is still there."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(seconds, self._pool.signal, worker, signal.SIGKILL))

    # disturbance

    def _preempt_due(self, now: float) -> None:
        if self._training_since is None or self._state.phase != "Running":
            return
        actions, self._preempt = due(self._preempt, self._state.step, now - self._training_since)
        for action in actions:
            worker = victim(action, status(self._state, now), self._taken)
            if worker is None:
                self._view.emit(Emit("PreemptionSkipped", "there is no worker to take away", True))
            else:
                self._take(Take(worker, notice=action.notice))

    def _take(self, take: Take) -> None:
        if take.worker in self._taken and not take.notice:
            self._pool.signal(take.worker, signal.SIGKILL)
        if take.worker in self._taken:
            return
        self._taken.add(take.worker)
        if take.notice:
            self._events.put_nowait(Notice(take.worker, NOTICE_SECONDS))
            self._later(NOTICE_SECONDS, take.worker)
        else:
            self._view.emit(Emit("Preempting", f"{take.worker} is killed without notice", True))
            self._pool.signal(take.worker, signal.SIGKILL)

    def _wish(self, wish: Wish) -> None:
        match wish:
            case Quit():
                self._interrupt()
            case Take() if not self._options.undisturbed:
                self._take(wish)

    def _interrupt(self) -> None:
        """The first time asks for a clean stop within five seconds; the second time ends everything now."""
        assert self._task is not None
        if self._closing:
            return
        if self._interrupted:
            self._task.cancel()
            self._closing = True
            return
        self._interrupted = True
        self._events.put_nowait(Interrupted())
        self._timers.append(asyncio.get_running_loop().call_later(GRACE_SECONDS - 1, self._task.cancel))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    # the end

    async def _sample(self) -> str | None:
        assert self._finish is not None
        if self._finish.outcome is not Outcome.COMPLETE:
            return None
        try:
            arguments = {"manifest": self._manifest, "weights_dir": str(self._folder / "weights")}
            text = await self._pool.call(SAMPLE, arguments)
        except PoolError as error:
            self._view.emit(Emit("SampleFailed", str(error), True))
            return None
        return str(text) if text is not None else None

    async def _close(self) -> None:
        self._closing = True
        for timer in self._timers:
            timer.cancel()
        try:
            await self._pool.close()
            await self._server.stop()
        finally:
            self._view.status(status(self._state, time.monotonic()))
            self._view.stop()
        if self._options.trace is not None:
            merge_traces(self._traces, self._options.trace)

    def _summary(self, sample: str | None) -> Summary:
        assert self._finish is not None
        failed = self._finish.outcome in (Outcome.FAILED, Outcome.UNRECOVERABLE)
        return summarize(
            self._spec.name,
            status(self._state, time.monotonic()),
            self._finish,
            batch=self._spec.training.global_batch_size,
            seconds=self._training_ended - self._training_since if self._training_since else 0.0,
            output=str(self._folder) if self._options.output else None,
            sample=sample,
            log_tail=self._pool.tail() or None if failed else None,
        )


def merge_traces(folder: Path, target: Path) -> None:
    """One Chrome trace from the workers' files, whose last line may be cut off."""
    events = []
    for path in sorted(folder.glob("*.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line.rstrip().rstrip(","))
                if isinstance(event, dict):
                    events.append(event)
    target.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
