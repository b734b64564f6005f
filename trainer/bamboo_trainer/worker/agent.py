"""The main loop of a worker, which joins the control channel, the transport and the engine in one process."""

import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final, NoReturn

import torch

from bamboo_core.complaints import said_by
from bamboo_core.control.client import Control
from bamboo_core.control.memory import SentTraffic, Traffic
from bamboo_core.control.protocol import (
    INITIAL_WEIGHTS,
    MOST_TEXT,
    Bye,
    CellFinished,
    CommitCheckpoint,
    DropCopies,
    FindCheckpoint,
    Heartbeat,
    Hello,
    HistoryEvents,
    HoldState,
    KeepLastState,
    Message,
    NoticeReceived,
    ProfileRequest,
    Refused,
    ReportRequest,
    SendPlan,
    StepCommitted,
    Stop,
    TakeCheckpoint,
    ToWorker,
    Welcome,
    WorkerFailed,
    WorkerWarning,
)
from bamboo_core.history.files import HistoryFiles
from bamboo_core.job.spec import ReplicaPlacement
from bamboo_core.names import EXIT_DRAINED, EXIT_FAILED, EXIT_FENCED, GRACE_SECONDS, STATE_RATE
from bamboo_core.planning.plan import ROOT, Plan
from bamboo_core.planning.spot_checks import SpotSchedule
from bamboo_trainer.checkpoint.initial import FirstTask
from bamboo_trainer.checkpoint.worker_checkpoints import WorkerCheckpoints
from bamboo_trainer.commit.commit_log import StepPolicy
from bamboo_trainer.commit.ports import NoHistory
from bamboo_trainer.engine.devices import make_engine
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.frames import FrameKind
from bamboo_trainer.memory.gpus import DeviceError, choose_devices, require_gpus, use
from bamboo_trainer.memory.host_copies import Copied, HostCopies, copies_by_device, together
from bamboo_trainer.memory.limits import device_memory, headroom, host_memory, memory_of
from bamboo_trainer.stage.compilation import CompilerUnavailable, require_toolchain
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import (
    NotDeterministic,
    RealInterrupt,
    TaskError,
    TaskOutOfMemory,
    describe,
    is_an_error,
    is_tasks,
    is_users,
    ran_out_of_memory,
    shown,
    where,
)
from bamboo_trainer.tasks.user_code import named_layer, run_layer, tokens_of
from bamboo_trainer.transport.base import Event
from bamboo_trainer.transport.tcp import TcpTransport
from bamboo_trainer.worker.followers import facts_of, followers_of
from bamboo_trainer.worker.history_keeper import HistoryKeeper, Rates
from bamboo_trainer.worker.loaded_job import LoadedJob, StagesOfJob, load_job
from bamboo_trainer.worker.platform import this_platform
from bamboo_trainer.worker.telemetry import Spans
from bamboo_trainer.worker.work_clock import WorkClock

KINDS = {
    FrameKind.ACTIVATION: "activation",
    FrameKind.GRADIENT: "gradient",
    FrameKind.SPOT_CHECK: "activation",
    FrameKind.CONTRIBUTION: "reduction",
    FrameKind.RESULT: "reduction",
    FrameKind.PARTIAL_SUM: "reduction",
    FrameKind.KEPT_SUM: "kept",
    FrameKind.TIED: "tied",
    FrameKind.SYNC: "sync",
    FrameKind.LAYER: "state",
}  # everything else is control


def by_kind(numbers: Sequence[int]) -> Traffic:
    """Return the bytes summed by kind of traffic. numbers: bytes, indexed by `FrameKind`."""
    sums = dict.fromkeys(Traffic.__struct_fields__, 0)
    for number in FrameKind:
        sums[KINDS.get(number, "control")] += numbers[number]
    return Traffic(**sums)


class TrafficMeter:
    """A meter of the bytes that a worker has sent, and of the steps in which it sent them."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._steps = 0

    def now(self, step: int | None, sent: Sequence[int]) -> SentTraffic | None:
        """Return the bytes sent so far, and the number of steps; None before the first step is over. Steps that are
        repeated from a checkpoint count again, as their bytes do.

        step: the current step; None without a plan. sent: bytes, indexed by `FrameKind`.
        """
        if step is not None and self._step is not None and step > self._step:
            self._steps += step - self._step
        self._step = step
        return SentTraffic(sent=by_kind(sent), steps=self._steps) if self._steps else None


Item = Event | Copied | ToWorker | NoticeReceived | Callable[[], None]  # a function is called by the main thread


class Inbox:
    """The queue of events, messages and calls for a worker's main thread, on which an idle worker waits."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()  # a signal handler may add while the main thread takes
        self._arrivals: dict[int, float] = {}  # of plans that are not obeyed yet, by epoch

    def put(self, item: Item) -> None:
        if isinstance(item, SendPlan):
            self._arrivals[item.plan.epoch] = time.monotonic()
        self._items.put(item)

    def arrival(self, plan: Plan) -> float | None:
        """Remove and return a plan's newest time of arrival, by time.monotonic(); None if it was removed before. A
        plan may have waited in this queue until an instruction ended.
        """
        return self._arrivals.pop(plan.epoch, None)

    def take(self, seconds: float) -> list[Item]:
        """Remove and return all items, oldest first. seconds: the longest wait for the first item; 0 does not wait."""
        items = []
        if seconds > 0:
            try:
                items.append(self._items.get(timeout=seconds))
            except Empty:
                return items
        while not self._items.empty():  # only this thread takes
            items.append(self._items.get_nowait())
        return items


logger = logging.getLogger(__name__)

# This machine lacks something, or refuses access: the message is complete, and a traceback adds nothing.
SELF_EXPLANATORY: Final = (DeviceError, CompilerUnavailable)


def failure_reason(error: BaseException) -> str:
    """Return the reason to report for an error that ends the worker, such as "OutOfMemory"."""
    if isinstance(error, DeviceError):
        return "DeviceUnavailable"
    if isinstance(error, CompilerUnavailable):
        return "CompilerUnavailable"
    if ran_out_of_memory(error):
        return "OutOfMemory"
    if isinstance(error, NotDeterministic):
        return "NotDeterministic"
    return "TaskFailed" if isinstance(error, TaskError) or is_tasks(error) else "WorkerError"


def failure_message(error: BaseException) -> str:
    """Return the message of an error that ends the worker: its own text if that is complete, else `describe`."""
    if isinstance(error, SELF_EXPLANATORY):
        return said_by(error)
    return str(error) if isinstance(error, TaskError | TaskOutOfMemory) else describe(error)


def exit_code(error: SystemExit) -> int:
    """Return the exit code that Python would use for a SystemExit. Log a code that is neither a number nor None."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    logger.error("%s", error.code)
    return EXIT_FAILED


def place_of(thread: int) -> str:
    """Return the layer that a thread runs, and the file, line and function of its innermost frame in user code, as
    text, as far as they are known; "" for neither. thread: its ident.

    If the thread has no such frame, for instance while it waits for data, use another thread's frame, if any has one.
    """
    stacks = sys._current_frames()
    own = stacks.pop(thread, None)
    layer = _layer(own)
    others = (stacks[t.ident] for t in threading.enumerate() if t.ident in stacks and t.ident != threading.get_ident())
    frames = (frame for stack in (own, *others) for frame in _outwards(stack))
    frame = next((frame for frame in frames if is_users(frame.f_code.co_filename)), None)
    at = f"{shown(frame.f_code.co_filename)} line {frame.f_lineno}, in {frame.f_code.co_name}" if frame else ""
    return ", ".join(filter(None, (layer, at)))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _layer(innermost: FrameType | None) -> str:
    frame = next((one for one in _outwards(innermost) if one.f_code is run_layer.__code__), None)
    return named_layer(frame.f_locals["task_layer"], frame.f_locals["layer"]) if frame else ""


IDLE_SECONDS = 0.5
LONG_SECONDS = 5.0  # a longer instruction is reported
FLUSH_SECONDS = 2.0
LATE_SECONDS = 0.02  # after which a late message is sent even between two pieces of work
HISTORY_SECONDS = 2.0  # for the last records of the history
LEAST_NOTICE_SECONDS = 5.0  # when a notice is repeated: it alone must not end a worker that still responds
SHORT_LOGGER_SECONDS = 5.0  # if others wait for this worker's end, to take over its work
LOGGER_SECONDS = 60.0  # for loggers at the end, to take the remaining records


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker that depend on where it runs: on a local machine or in a pod.

    host: this machine's address, for the other workers. grace: seconds from SIGTERM to SIGKILL. authority: PEM of the
    authority that signed the coordinator's certificate; "" for the authorities that this machine trusts. metrics_port:
    None serves no metrics. logger_seconds: the longest wait for loggers after a `Stop` or an error. pod: the worker
    has its own container, with the resources that the job requests, and a log that no other worker writes.
    """

    host: str = "127.0.0.1"
    grace: float = GRACE_SECONDS
    authority: str = ""
    metrics_port: int | None = None
    logger_seconds: float = LOGGER_SECONDS
    pod: bool = False


LOCAL_SETTINGS = WorkerSettings()


def _interrupt(*_: object) -> NoReturn:
    raise RealInterrupt


class WorkerAgent:
    """The main loop of a worker, which obeys the coordinator, runs the engine and reports failures. run() returns the
    process's exit code.
    """

    def __init__(
        self,
        worker: str,
        url: str,
        token: Callable[[], str],
        zone: str,
        spans: Spans,
        settings: WorkerSettings,
    ) -> None:
        self.worker, self.zone, self.spans, self.settings = worker, zone, spans, settings
        self.inbox = Inbox()
        self.transport = TcpTransport(worker, os.urandom(16).hex(), self.inbox.put, settings.host)
        self.traffic = TrafficMeter()
        self.control = Control(url, token, self._hello, self._heartbeat, self.inbox.put, settings.authority)
        self.engine: Engine | None = None
        self.job: LoadedJob | None = None
        self.checkpoints: WorkerCheckpoints | None = None
        self.history: HistoryKeeper | None = None
        self.job_over = False  # or continues without this worker
        self.end_by = math.inf  # the end of the grace period, after a SIGTERM
        self.leave_by = math.inf  # the deadline, after a notice
        self.doing = "starting"
        self.thread = threading.get_ident()  # the thread that runs the task's code
        self.began: float | None = None  # when it began to load the task
        self.devices: tuple[torch.device, ...] = ()
        self.platform = this_platform(worker)
        self.late: float | None = None  # since when the control channel has an unsent message
        self.exit_code: int | None = None
        self.last = ""  # line of the log: why it ends

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_term)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        self.control.start()
        try:
            while self.exit_code is None:
                self._turn()
        except SystemExit as error:
            self.exit_code = exit_code(error)
            logger.exception("the task's code ended this worker")
            self.last = f"ended by sys.exit with code {self.exit_code} ({where(error)})"
        except BaseException as error:
            if not is_an_error(error):
                raise
            if not isinstance(error, SELF_EXPLANATORY):
                logger.exception("the worker failed")
            self._fail(failure_reason(error), failure_message(error))
        finally:
            if self.history:
                patience = self.settings.logger_seconds if self.job_over else SHORT_LOGGER_SECONDS
                self.history.close(HISTORY_SECONDS, patience)
            self.transport.close(FLUSH_SECONDS if self.exit_code == EXIT_DRAINED else 0.0)
            self.control.close(FLUSH_SECONDS)
            self.spans.close()
            if self.job:
                self.job.reader.close()
            if self.checkpoints:
                self.checkpoints.close()
            if self.last:  # Kubernetes shows the last line of a pod's log as the reason of its end
                logger.error(self.last)
        assert self.exit_code is not None
        return self.exit_code

    def _turn(self) -> None:
        busy = self.engine.turn() if self.engine else False
        if self.late is not None and not (busy and time.monotonic() < self.late + LATE_SECONDS):
            self.late = None
            self.control.wake()
        items = self.inbox.take(0.0 if busy else IDLE_SECONDS)
        if self.engine:  # what it waits for matters only after a long wait
            self.doing = "training" if busy or items else f"waiting for {self.engine.waits_for()}"
        for item in items:
            if isinstance(item, Message):
                self._obey(item)
            elif callable(item):
                item()
            elif self.engine:
                self.engine.handle(item)

    def _obey(self, message: Message) -> None:
        match message:
            case Welcome():
                self._begin(message)
            case HistoryEvents() if self.history:
                self.history.happened(message)
            case ProfileRequest():
                assert self.job is not None
                self.control.send(self.job.profile(device_memory(self.devices)))
            case ReportRequest() if self.engine:
                self.engine.report()
            case SendPlan(plan=plan):
                if self.engine:
                    self.engine.obey(plan, self.inbox.arrival(plan))
            case TakeCheckpoint() if self.engine:
                self.engine.take_checkpoint(message)
            case KeepLastState() if self.engine:
                self.engine.keep_last_state(message)
            case HoldState(checkpoint=checkpoint) if self.engine:
                self.engine.hold(checkpoint)
            case CommitCheckpoint() if self.checkpoints:
                self._commit(partial(self.checkpoints.obey, message))
            case FindCheckpoint() if self.checkpoints:
                self.checkpoints.obey(message)
            case DropCopies(checkpoints=checkpoints):
                if self.engine:
                    self.engine.drop_copies(checkpoints)
                if self.checkpoints:
                    self.checkpoints.drop(checkpoints)
            case NoticeReceived(seconds=seconds):
                self.leave_by = time.monotonic() + seconds
                self.control.send(message)
            case Stop():
                self._await_loggers()
                self.control.send(Bye())
                self.exit_code = EXIT_DRAINED
            case Refused(reason=reason, message=text):
                logger.warning("%s is refused and ends: %s: %s", self.worker, reason, text)
                self.exit_code = EXIT_FENCED

    def _begin(self, welcome: Welcome) -> None:
        if self.engine:  # the channel was cut, or the coordinator restarted
            self._say_again(self.engine)
            return
        self.began = time.monotonic()
        job = self.job = load_job(welcome.manifest)
        devices = self.devices = choose_devices(self.worker, job.spec.worker.devices)
        if self.settings.pod:
            require_gpus(job.spec, devices)
        use(devices[0], deterministic=job.spec.training.deterministic)
        require_toolchain(job.spec.training, gpu=devices[0].type == "cuda")
        if welcome.history:
            facts, files = facts_of(job.spec.name, welcome.history), HistoryFiles(welcome.history)
            followers = followers_of(job.loggers, job.task.callbacks, facts, files, self.control.send)
            rates = Rates(batch=job.spec.training.global_batch_size, tokens=tokens_of(job.task))
            self.history = HistoryKeeper(files, rates, self.control.send, followers)
        by_device = copies_by_device(devices, partial(self.inbox.put, Copied()))
        self.transport.trust(welcome.secret, STATE_RATE, together(by_device).buffer)
        self.checkpoints = WorkerCheckpoints(
            job.spec, len(job.task.layers), self.control.send, job.data, welcome.last_state
        )
        self.engine = make_engine(self._ports(job, self.checkpoints, by_device), job.spec.worker.devices)
        self.control.send(job.ready())

    def _say_again(self, engine: Engine) -> None:
        """Resend the reports that still matter after a reconnection: the broken channel may have lost them."""
        assert self.job is not None
        self.control.send(self.job.ready())
        if self.leave_by < math.inf:
            self.control.send(NoticeReceived(seconds=max(LEAST_NOTICE_SECONDS, self.leave_by - time.monotonic())))
        engine.report()
        if self.checkpoints:
            self.checkpoints.report()

    def _ports(self, job: LoadedJob, files: WorkerCheckpoints, copies: Mapping[torch.device, HostCopies]) -> Ports:
        spec, task = job.spec, job.task
        return Ports(
            worker=self.worker,
            steps=spec.training.steps,
            builder=StagesOfJob(job, FirstTask(spec.task.initial_from, task, self._tell_initial), self.devices, copies),
            files=files,
            new_id=lambda: secrets.token_hex(6),
            transport=self.transport,
            coordinator=self,
            history=self.history or NoHistory(partial(self._tell_of_callbacks, task)),
            observer=self.spans,
            clock=time.monotonic,
            work_clock=WorkClock(),
            on_host=spec.redundancy.placement is ReplicaPlacement.HOST,
            policy=StepPolicy.of(spec.training, task),
            host_memory=host_memory,
            evaluations=job.evaluations,
            spots=SpotSchedule() if job.config.deterministic else None,
            deterministic=job.config.deterministic,
            copies=together(copies),
        )

    def _tell_of_callbacks(self, task: Task) -> None:
        """Warn that the task's callbacks, if any, are not called. The root of a job without a history calls this."""
        if task.callbacks:
            names = ", ".join(sorted(task.callbacks))
            text = f"the callbacks {names} are called with what is in the job's history, and it keeps none"
            self.control.send(WorkerWarning(reason="CallbacksNotCalled", message=text))

    def _commit(self, commit: Callable[[], None]) -> None:
        """Call `commit`, which commits a checkpoint: at once or, if a history is kept, later (see `when_written`)."""
        if self.history:
            self.history.when_written(partial(self.inbox.put, commit))
        else:
            commit()

    def tell(self, message: Message) -> None:
        """Send a message to the coordinator. The root's CellFinished, after which the job may end, first waits for the
        history (`when_written`). While the engine is busy, a StepCommitted may wait for LATE_SECONDS and a turn more.
        """
        if isinstance(message, CellFinished):
            finish = partial(self.control.send, message)
            if self.history and message.cell == ROOT:
                self.history.when_written(finish, complete=True)
            else:
                finish()
        elif isinstance(message, StepCommitted):
            self.control.send(message, late=True)
            self.late = self.late or time.monotonic()
        else:
            self.control.send(message)

    def _tell_initial(self, text: str) -> None:
        self.control.send(WorkerWarning(reason=INITIAL_WEIGHTS, message=text[:MOST_TEXT]))

    def _fail(self, reason: str, message: str) -> None:
        self.control.send(WorkerFailed(reason=reason, message=message))
        self._await_loggers()
        self.exit_code, self.last = EXIT_FAILED, f"{reason}: {message}"

    def _await_loggers(self) -> None:
        """Let `run` give loggers their full time at its end, as no other worker waits for this; report any wait."""
        self.job_over = True
        if self.history:
            self.history.announce_end(self.settings.logger_seconds)

    def _hello(self) -> Hello:
        return Hello(
            worker=self.worker,
            host=self.settings.host,
            port=self.transport.port,
            zone=self.zone,
            pid=os.getpid(),
            platform=self.platform,
            plan=self.engine.reported_plan if self.engine else None,
        )

    def _heartbeat(self) -> Heartbeat:
        """Return a heartbeat: progress, memory and traffic. The control channel's thread calls it."""
        now = time.monotonic()
        if self.engine is None:
            place = place_of(self.thread) if self.began is not None and now > self.began + LONG_SECONDS else ""
            return Heartbeat(step=0, doing=f"starting, at {place}" if place else "starting")
        times = self.engine.times_due(now)
        inside, busy = self.spans.now()
        doing = self.doing
        if busy > LONG_SECONDS:
            doing = ", ".join(filter(None, (f"{inside} for {busy:.0f} s", place_of(self.thread))))
        step = self.engine.step
        return Heartbeat(
            step=step,
            doing=doing,
            memory=memory_of(self.devices),
            busy=busy,
            times=times,
            headroom=headroom(self.devices) if times else None,
            traffic=self.traffic.now(step if self.engine.newest_plan else None, self.transport.sent),
            backwards=self.engine.backwards,
        )

    def _on_term(self, *_: object) -> None:
        """Handle SIGTERM as a preemption notice: the worker has the grace period to hand over its stages. Another
        SIGTERM in that period changes nothing, as a person and the kubelet may send one each; a later one ends the
        worker at once.
        """
        now = time.monotonic()
        if now >= self.end_by:
            os._exit(128 + signal.SIGTERM)
        if self.end_by == math.inf:
            self.end_by = now + self.settings.grace
            self.inbox.put(NoticeReceived(seconds=self.settings.grace))
