"""The local runner, which runs a BambooJob on this machine, with the coordinator in this process.

Its loop takes events from one queue, passes each to `coordinator.step`, and executes the returned commands at once.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bamboo import loop_signals
from bamboo.job_source import JobSource
from bamboo.local.closing import Closing
from bamboo.local.fork_server import ForkServer, ForkServerError
from bamboo.local.history_end import StepsHeard, end_history
from bamboo.local.output_folder import LAST_STATE, WEIGHTS
from bamboo.local.preemptor import Preemptor, Strike
from bamboo.local.scheduling import NOTICE_SECONDS, Schedule
from bamboo.local.scratch import scratch_folder
from bamboo.local.trace_files import merge_traces
from bamboo.local.views.summary import Summary
from bamboo.local.views.worker_log import LogFollower
from bamboo.local.workers import GRACE_SECONDS, LocalWorkers
from bamboo.terminal.view import ChangeJob, RunView, StopJob, TakeWorker, UserRequest
from bamboo_core.complaints import said_by, system_reason
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Bye, Evaluated, Received, StepCommitted, WorkerWarning
from bamboo_core.control.server import ControlServer, token_check
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.awake_clock import AwakeClock
from bamboo_core.coordinator.events import (
    AddWorkers,
    Command,
    Emit,
    Event,
    Finish,
    Interrupted,
    Outcome,
    PreemptionNotice,
    PricesReported,
    RemoveWorker,
    Send,
    SpecChanged,
    Status,
    Tick,
)
from bamboo_core.coordinator.finish import last_checkpoint
from bamboo_core.coordinator.history_feed import HistoryFeed
from bamboo_core.coordinator.job_status import status
from bamboo_core.history.files import history_url
from bamboo_core.history.records import HistoryError
from bamboo_core.job.placement_spec import one_price
from bamboo_core.job.spec import wanted_workers
from bamboo_core.names import HEARTBEAT_TIMEOUT_SECONDS
from bamboo_core.planning.plan import ROOT, WorkerId
from bamboo_core.serving.descriptors import raise_limit
from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.url import shown_url
from bamboo_core.text import count, one_line

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
DRAIN_SECONDS = 3.0  # for the workers to leave when the job is over
ANSWER_SECONDS = 30.0  # for the root of a complete job to report whether its loggers still write
LOGGER_SECONDS = 75.0  # for workers whose loggers still write; they report a timeout themselves after a minute
EXPORT = "bamboo_trainer.checkpoint.export:export_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The parsed options of a local run."""

    preempt: Schedule = field(default_factory=Schedule)
    output: Path | None = None  # folder for weights and logs
    trace: Path | None = None  # file for the merged trace
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT_SECONDS
    replace_after: float = 0.0  # seconds until a lost worker is replaced
    store_writable: bool = True  # the store of checkpoints; if False, the history is kept in the output
    show_log: Callable[[str], object] | None = None  # receives what the workers print and log


async def run_job(job: JobSource, options: RunOptions, view: RunView) -> Summary:
    """Run the job until it ends, or a signal or the view stops it. Leave no process and no socket behind.

    Raises ForkServerError if the launcher does not start, OSError for a file or port, and what `view.start` raises.
    """
    with scratch_folder() as scratch:
        return await _LocalRun(job, options, view, scratch).run()


class _LocalRun:
    """One local run. It passes events to the coordinator, executes its commands, and preempts workers."""

    def __init__(self, job: JobSource, options: RunOptions, view: RunView, scratch: Path) -> None:
        spec = job.spec
        self._spec, self._options, self._view = spec, options, view
        self._folder = options.output.absolute() if options.output else scratch
        self._traces = scratch / "traces"
        self._traces.mkdir()
        self._token = secrets.token_hex(16)
        self._now = AwakeClock()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._server = ControlServer(
            self._events.put_nowait, token_check(self._token), heartbeat=2 * options.heartbeat_timeout
        )
        self._url = ""
        task_module = spec.task.entrypoint.partition(":")[0]
        imports = [task_module] if task_module.startswith("bamboo_trainer.") else []
        self._pool = ForkServer(
            self._exited,
            self._folder / "workers.log",
            imports=imports,
            folders=job.folders,
            scratch=scratch,
            on_ask=self._asked,
            on_wait=self._waits,
        )
        self._log = LogFollower(self._folder / "workers.log", options.show_log) if options.show_log else None
        self._steps = StepsHeard(spec.training.global_batch_size)
        self._feed = HistoryFeed(secrets.token_hex(4), time.time)
        self._state = coordinator.initial(
            spec,
            job.document,
            secret=secrets.token_hex(16),
            now=self._now(),
            heartbeat_timeout=options.heartbeat_timeout,
            history=history_url(spec, options.output, stored=options.store_writable),
            last_state=(self._folder / LAST_STATE).as_uri() if options.output and not spec.checkpoint else "",
        )
        self._workers = LocalWorkers(self._pool, spec.spread.workers_per_node)
        per_node = spec.spread.workers_per_node
        self._preemptor = Preemptor(options.preempt, spec.training.microbatches, self._workers.lost_with, per_node)
        self._ending = Closing()
        self._finish: Finish | None = None
        self._training_since: float | None = None  # seconds on the clock `_now`
        self._recorded_since: float | None = None  # when the recorded nodes began to come and go, on the same clock
        self._began = self._ended = 0.0  # training, on time.monotonic()
        self._timers: list[asyncio.TimerHandle] = []
        self._task: asyncio.Task[Any] | None = None
        self._asked_for = 0  # workers that the coordinator has requested so far
        self._without_room = 0  # workers that wait for recorded nodes
        self._driving = False
        self._interrupted = False
        self._closing = False
        self._logging: set[WorkerId] = set()  # workers whose loggers still write

    async def run(self) -> Summary:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._task = asyncio.current_task()
        with loop_signals.taken(self._interrupt):
            try:
                self._view.start(self._request)
                await self._pool.open()
                raise_limit()
                self._url = await self._server.start()
                await self._drive()
                await self._keep_weights()
                await self._ending.wait("while the workers left", self._drain(), 2 * LOGGER_SECONDS)
            except asyncio.CancelledError:
                if not self._interrupted:
                    raise
            finally:
                await self._close()
        return self._summary(self._outcome())

    # events

    async def _drive(self) -> None:
        ticker = asyncio.create_task(self._tick_for_ever())
        self._driving = True
        price = one_price(self._spec.node_pools)
        self._handle(PricesReported({}, () if price is None else ((price, 1),)))
        try:
            while self._finish is None:
                self._handle(await self._events.get())
        finally:
            self._driving = False
            ticker.cancel()

    async def _drain(self) -> None:
        """Wait for a limited time until the workers have left; `_close` kills the remaining ones."""
        if self._interrupted and self._task:
            self._timers.append(asyncio.get_running_loop().call_later(GRACE_SECONDS - 1, self._task.cancel))
        begun, silent = time.monotonic(), self._silent_root()
        while alive := set(self._workers.alive):
            self._logging &= alive
            silent &= alive
            seconds = LOGGER_SECONDS if self._logging else ANSWER_SECONDS if silent else DRAIN_SECONDS
            if (left := begun + seconds - time.monotonic()) <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    event = await self._events.get()
                if not self._hear_of_loggers(event):
                    self._handle(event)
                if isinstance(event, Received) and isinstance(event.message, WorkerWarning | Bye):
                    silent.discard(event.worker)
        self._logging &= set(self._workers.alive)
        if self._logging:
            self._lacking("were not waited for any longer")

    def _silent_root(self) -> set[WorkerId]:
        """Return the workers that still have to report that their loggers are done: the root of a complete job with a
        history, whose pending kill is cancelled; else none.
        """
        complete = self._finish is not None and self._finish.outcome is Outcome.COMPLETE
        if not (complete and self._state.terms.history and self._state.plan):
            return set()
        root = self._state.plan.at(ROOT).owner
        self._workers.spare(root)
        return {root}

    def _hear_of_loggers(self, event: Event) -> bool:
        """Show a worker's report that its loggers still write, and spare it. Return False for other events."""
        match event:
            case Received(worker, WorkerWarning(reason=protocol.LOGGERS_AWAITED, message=text)):
                self._logging.add(worker)
                self._workers.spare(worker)
                self._tell(Emit("LoggersAwaited", f"{worker}: {one_line(text)}; Ctrl-C ends the wait"))
                return True
        return False

    def _waits(self, text: str) -> None:
        """Show a sentence while the run waits for a process to start or to answer."""
        self._view.emit(Emit("ProcessAwaited", text))

    def _lacking(self, why: str) -> None:
        text = f"the loggers of {', '.join(sorted(self._logging))} {why}, and may lack the last steps"
        self._tell(Emit("LoggerIncomplete", text, True))
        self._logging.clear()

    async def _tick_for_ever(self) -> None:
        while True:
            self._events.put_nowait(Tick())
            await asyncio.sleep(TICK_SECONDS)

    def _handle(self, event: Event) -> None:
        now, event = self._now(), self._workers.located(event)
        self._state, commands = coordinator.step(self._state, event, now)
        messages = [command for command in commands if isinstance(command, Emit)]
        if owed := self._feed.follow(event, messages, self._state.plan if self._state.terms.history else None):
            self._server.send(*owed)
        for command in commands:
            self._execute(command)
        if self._state.phase == "Running" and self._training_since is None:
            self._training_since, self._began = now, time.monotonic()
        self._play(now)
        self._end_without_nodes(now)
        committed = event.message if isinstance(event, Received) else None
        if isinstance(committed, StepCommitted):
            self._ended = time.monotonic()
            self._steps.committed(committed, time.time())
        elif isinstance(committed, Evaluated):
            self._steps.evaluated(committed, time.time())
        if isinstance(committed, StepCommitted) or isinstance(event, Tick):
            self._preempt_due(now, self._state.step)
            self._add(0)
            self._view.status(status(self._state, now))
        if self._log and isinstance(event, Tick):
            self._log.follow()

    def _tell(self, emit: Emit) -> None:
        """Show and record an event that the coordinator does not know."""
        self._feed.add(emit)
        self._view.emit(emit)

    def _exited(self, worker: WorkerId, code: int | None) -> None:
        taken, over = self._preemptor.was_taken(worker), self._finish is not None
        self._events.put_nowait(self._workers.ended(worker, code, taken=taken, over=over))

    def _fail(self, reason: str, message: str) -> None:
        """Fail the job for a reason that the coordinator does not know."""
        if self._finish is None:
            self._tell(Emit(reason, message, True, final=True))
            self._finish = Finish(Outcome.FAILED, reason, message)

    # commands

    def _execute(self, command: Command) -> None:
        match command:
            case Send(worker, message):
                self._server.send(worker, message)
            case AddWorkers(number):
                first = min(number, max(0, wanted_workers(self._spec) - self._asked_for))
                self._asked_for += number
                self._add(first)
                self._replace(number - first)
            case RemoveWorker(worker):
                self._workers.remove(worker)
            case Emit():
                self._view.emit(command)
            case Finish():
                self._finish = self._finish or command

    def _replace(self, number: int) -> None:
        """Start workers in place of lost ones, after the delay of --replace-after."""
        if not number or self._options.replace_after <= 0:
            self._add(number)
        else:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(self._options.replace_after, self._add, number))

    def _add(self, number: int) -> None:
        """Start `number` more workers and the waiting ones, as far as the recorded nodes have room; the others wait."""
        if self._finish or self._closing:
            return
        wanted = self._without_room + number
        room = self._preemptor.room(self._recorded(self._now()), self._workers.alive)
        starting = wanted if room is None else min(wanted, max(0, room))
        self._without_room = wanted - starting
        for _ in range(starting):
            try:
                traces = self._traces if self._options.trace else None
                self._workers.start(self._preemptor.gate, self._url, self._token, traces)
            except ForkServerError as error:
                self._fail("LauncherLost", said_by(error))
                return

    # preemptions

    def _play(self, now: float) -> None:
        """Start the clock of the recorded nodes when the job trains, or when it lacks nodes to begin.

        Until then the clock stands still, because workers take time to start.
        """
        if self._recorded_since is not None:
            return
        lacks = self._without_room and all(self._is_ready(worker) for worker in self._workers.alive)
        if self._training_since is None and lacks:
            text = f"{count(self._without_room, 'worker')} more when the recording has nodes for them"
            self._tell(Emit("NodesAwaited", text))
        if self._training_since is not None or lacks:
            self._recorded_since = now

    def _end_without_nodes(self, now: float) -> None:
        """Fail the job if the recording has no node now or later, and no worker is left."""
        if self._preemptor.leaves_none(self._recorded(now)) and not self._workers.alive:
            done = f"{self._state.step} of {count(self._spec.training.steps, 'step')} are done"
            self._fail("RecordingOver", f"the recording of nodes is over, and none is left at its end; {done}")

    def _is_ready(self, worker: WorkerId) -> bool:
        record = self._state.workers.get(worker)
        return record is not None and record.ready

    def _recorded(self, now: float) -> float:
        """Return the seconds since the clock of the recorded nodes was started; 0 before that."""
        return 0.0 if self._recorded_since is None else now - self._recorded_since

    def _asked(self, worker: WorkerId, step: int) -> None:
        """Execute due preemptions when a worker asks to begin a forward or backward; then let the worker proceed."""
        now = self._now()
        self._preemptor.begins(worker, step)
        self._preempt_due(now, max(step, self._state.step))
        self._pool.proceed(worker)  # a SIGKILL that was sent before arrives first

    def _preempt_due(self, now: float, step: int) -> None:
        """Execute the preemptions that are due, if the job trains. step: as in `Preemptor.due`."""
        if self._training_since is None or self._state.phase != "Running":
            return
        seconds, recorded, alive = now - self._training_since, self._recorded(now), self._workers.alive

        def shown() -> Status:
            return status(self._state, now)

        for due in self._preemptor.due(step, self._state.step, seconds, recorded, alive, shown):
            if due is None:
                self._tell(Emit("PreemptionSkipped", "there is no worker to take away", True))
            else:
                self._strike(due)

    def _strike(self, strike: Strike) -> None:
        """Kill a worker, or give it notice and kill it after NOTICE_SECONDS."""
        if strike.notice:
            self._events.put_nowait(PreemptionNotice(strike.worker, NOTICE_SECONDS))
            self._workers.kill_after(NOTICE_SECONDS, strike.worker)
        else:
            self._tell(Emit("Preempting", f"{strike.worker} is killed without notice{strike.where}", True))
            self._workers.kill(strike.worker)

    def _request(self, request: UserRequest) -> None:
        match request:
            case StopJob():
                self._interrupt()
            case TakeWorker():
                for strike in self._preemptor.take(request.worker, notice=request.notice):
                    self._strike(strike)
            case ChangeJob():
                self._spec = request.spec
                self._events.put_nowait(SpecChanged(request.spec))

    def _interrupt(self) -> None:
        """Handle a stop signal or StopJob: the first asks the coordinator to end the job, the second cancels the run.

        Outside `_drive`, cancel at once, or only end a wait for loggers. In `_close`, only note the stop.
        """
        assert self._task is not None
        if self._logging and not self._closing:  # the job is over; Ctrl-C ends only this wait
            for worker in self._logging:
                self._workers.kill(worker)
            return self._lacking("were not waited for, as you asked")
        again, self._interrupted = self._interrupted, True  # even if the run ends anyway, so that no second run follows
        if not self._closing and (again or not self._driving):
            self._closing = True
            self._task.cancel()
        elif not self._closing:
            if self._spec.checkpoint and self._state.phase == "Running":
                self._tell(Emit("Interrupted", "the state is kept first; a second Ctrl-C ends the job at once"))
            self._events.put_nowait(Interrupted())

    # the end

    async def _keep_weights(self) -> None:
        """Export a complete job's weights to the output, if any. If that fails, the job fails; its checkpoint stays."""
        output, finish, state = self._options.output, self._finish, self._state
        if output is None or finish is None or finish.outcome is not Outcome.COMPLETE:
            return
        last, problem = last_checkpoint(state), "its last state could not be kept"
        if last is not None:
            url = self._spec.checkpoint.place(self._spec.name) if self._spec.checkpoint else state.terms.last_state
            arguments = {"url": url, "step": last.step, "id": last.id, "folder": str(self._folder / WEIGHTS)}
            problem = await self._exported(arguments)
            if problem:
                problem += f"; the checkpoint is in {shown_url(url)}, and `bamboo export` can write it elsewhere"
        if problem:
            self._finish = None
            self._fail("SaveFailed", f"all steps are done, and the weights are not written: {problem}")
        else:
            shutil.rmtree(self._folder / LAST_STATE, ignore_errors=True)

    async def _exported(self, arguments: dict[str, Any]) -> str:
        """Write the weights in a process forked by the launcher. Return the problem, a sentence, or ""."""
        try:
            answer = await self._pool.call(EXPORT, arguments)
        except ForkServerError as error:
            return said_by(error)
        return str(answer.get("problem", ""))

    async def _close(self) -> None:
        self._closing = True
        if self._logging:
            self._lacking("were not waited for")
        self._workers.forget_kills()
        for timer in self._timers:
            timer.cancel()
        ending = self._ending
        try:
            await ending.wait("while the workers' processes were ended", self._pool.close())
            await ending.wait("while the workers' connections were closed", self._server.stop())
        finally:
            if self._log:
                ending.do("while the workers' log was shown", self._log.end)
            ending.do("while the last state was shown", lambda: self._view.status(status(self._state, self._now())))
            ending.do("while the view was closed", self._view.stop)
            ending.do("while the history was completed", self._end_history)
            ending.do("while the trace was written", self._write_trace)
            ending.tell()

    def _end_history(self) -> None:
        """Complete the job's history, if it has one (see `end_history`). Log a failure."""
        if self._state.terms.history:
            try:
                end_history(self._state.terms.history, self._feed.rest(), self._steps, self._options.output)
            except (StorageError, HistoryError) as error:
                logger.error("the history is not complete: %s", error)

    def _write_trace(self) -> None:
        """Write the merged trace, if --trace is given. A failure is logged and does not fail the job."""
        if (path := self._options.trace) is not None:
            try:
                merge_traces(self._traces, path)
            except OSError as error:
                logger.error("--trace %s: %s", path, system_reason(error))

    def _outcome(self) -> Finish:
        """Return how the job ended; INTERRUPTED if the user stopped it and it did not fail, even if it is complete."""
        if self._interrupted and (self._finish is None or self._finish.outcome is Outcome.COMPLETE):
            return Finish(Outcome.INTERRUPTED, "Interrupted", "stopped by the user")
        assert self._finish is not None
        return self._finish

    def _summary(self, finish: Finish) -> Summary:
        failed = finish.outcome in (Outcome.FAILED, Outcome.UNRECOVERABLE)
        unexplained = failed and (self._workers.crashes or finish.reason in ("WorkerError", "LauncherLost"))
        return Summary(
            job=self._spec.name,
            outcome=finish.outcome,
            reason=finish.reason,
            message=finish.message,
            status=status(self._state, self._now()),
            seconds=max(0.0, self._ended - self._began),
            batch=self._spec.training.global_batch_size,
            output=str(self._folder) if self._options.output else None,
            crashes=tuple(self._workers.crashes),
            log_tail=self._pool.tail() or None if unexplained and not self._log else None,
            log_shown=self._log is not None,
        )
