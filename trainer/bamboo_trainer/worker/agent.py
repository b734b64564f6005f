"""One worker: the control channel, the transport and the engine put together, in one process."""

import logging
import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from bamboo.checkpoint.resume import owner_of
from bamboo.control.protocol import (
    MOST_TEXT,
    Bye,
    CellFinished,
    CommitCheckpoint,
    DropCopies,
    FindCheckpoint,
    Heartbeat,
    Hello,
    HistoryEvents,
    KeepLastState,
    Message,
    NoticeReceived,
    Profile,
    ProfileRequest,
    Refused,
    ReportRequest,
    RestoreFailed,
    Save,
    Saved,
    SendPlan,
    Stop,
    TakeCheckpoint,
    ToWorker,
    Welcome,
    WorkerFailed,
    WorkerReady,
)
from bamboo.control.verification import LookAgain
from bamboo.job.manifest import parse_manifest
from bamboo.job.placement_spec import VerifyMode
from bamboo.job.spec import JobSpec, ReplicaPlacement
from bamboo.names import EXIT_DRAINED, EXIT_FAILED, EXIT_FENCED, GRACE_SECONDS
from bamboo.planning.plan import ROOT
from bamboo.planning.schedule import StageOrder
from bamboo_trainer.commit.history import NoHistory
from bamboo_trainer.commit.step_policy import StepPolicy
from bamboo_trainer.compilation.toolchain import require_toolchain
from bamboo_trainer.engine.divided_engine import make_engine
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.observer import Observer
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.loading import load_task
from bamboo_trainer.loggers.from_manifest import loggers_of
from bamboo_trainer.memory.cgroup import host_memory
from bamboo_trainer.memory.headroom import headroom
from bamboo_trainer.memory.host_copies import Copied, copies_by_device, together
from bamboo_trainer.memory.placement import choose_devices, use
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.evaluation import evaluation_schedule
from bamboo_trainer.tasks.inspection.costs import profile, trained_sizes
from bamboo_trainer.tasks.inspection.sharing import settled
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.task_errors import where
from bamboo_trainer.tasks.user_code import dataset_length, tokens_of
from bamboo_trainer.telemetry.current_instruction import CurrentInstruction
from bamboo_trainer.training import TrainingConfig, shown_to_build, with_steps
from bamboo_trainer.transport.choice import body_channel
from bamboo_trainer.transport.tcp import TcpTransport
from bamboo_trainer.worker.checkpointing import Checkpointing, RestoreError
from bamboo_trainer.worker.cloud_notices import LEAST_SECONDS, CloudNotice, Wanted
from bamboo_trainer.worker.control import Control
from bamboo_trainer.worker.failure_reasons import OF_MACHINE, exit_code, failure_message, failure_reason
from bamboo_trainer.worker.history.history_buffer import Rates
from bamboo_trainer.worker.history.history_keeper import HistoryKeeper
from bamboo_trainer.worker.history.logging_threads import LoggingThreads, facts_of
from bamboo_trainer.worker.inbox import HistoryWritten, Inbox
from bamboo_trainer.worker.platform import this_platform
from bamboo_trainer.worker.saving import SaveError, save_weights
from bamboo_trainer.worker.traffic import TrafficMeter

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
LONG_SECONDS = 5.0  # an instruction that takes longer is worth telling
FLUSH_SECONDS = 2.0
HISTORY_SECONDS = 2.0  # for what happened last


class ClosingObserver(Observer, Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Where a worker runs.

    host: this machine's address, for the other workers. grace: seconds from SIGTERM to SIGKILL. authority: PEM of who
    signed the coordinator's certificate; "" for those that this machine trusts. metadata: the cloud's endpoint that is
    watched for notices, if any. metrics_port: of its own metrics. shared_log: others write to the same file.
    """

    host: str = "127.0.0.1"
    grace: float = GRACE_SECONDS
    authority: str = ""
    metadata: Wanted | None = None
    metrics_port: int | None = None
    shared_log: bool = True


LOCAL_SETTINGS = WorkerSettings()


class WorkerAgent:
    """The agent around the engine. run() returns the process's exit code."""

    def __init__(
        self,
        worker: str,
        url: str,
        token: Callable[[], str],
        zone: str,
        observer: ClosingObserver,
        settings: WorkerSettings,
    ) -> None:
        host = settings.host
        self.worker, self.zone, self.observer, self.host = worker, zone, observer, host
        self.inside = CurrentInstruction(observer, time.monotonic)
        self.grace = settings.grace
        self.inbox = Inbox()
        self.transport = TcpTransport(worker, os.urandom(16).hex(), self.inbox.put, host)
        self.traffic = TrafficMeter()
        self.control = Control(url, token, self._hello, self._heartbeat, self._heard, settings.authority)
        self.plan_arrived: dict[int, float] = {}  # by epoch
        self.engine: Engine | None = None
        self.task: Task | None = None
        self.spec: JobSpec | None = None
        self.reader: BatchReader | None = None
        self.checkpoints: Checkpointing | None = None
        self.history: HistoryKeeper | None = None
        self.terminated = False  # by a first SIGTERM
        self.leave_by = math.inf  # the earliest deadline of all notices
        self.doing = "starting"
        self.devices: tuple[torch.device, ...] = ()
        self.platform = this_platform(worker)
        self.to_save: list[Save] = []
        self.exit_code: int | None = None
        self.last = ""  # line of the log: why it ends

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_term)
        self.control.start()
        try:
            while self.exit_code is None:
                self._turn()
        except OF_MACHINE as error:
            self._fail(failure_reason(error), str(error))
        except Exception as error:
            logger.exception("the worker failed")
            self._fail(failure_reason(error), failure_message(error))
        except SystemExit as error:
            self.exit_code = exit_code(error)
            logger.exception("the task's code ended this worker")
            self.last = f"ended by sys.exit with code {self.exit_code} ({where(error)})"
        finally:
            if self.history:
                self.history.close(HISTORY_SECONDS)
            self.transport.close(FLUSH_SECONDS if self.exit_code == EXIT_DRAINED else 0.0)
            self.control.close(FLUSH_SECONDS)
            self.observer.close()
            if self.reader:
                self.reader.close()
            if self.checkpoints:
                self.checkpoints.close()
            if self.last:  # the last line of a pod's log is what Kubernetes tells of its end
                logger.error(self.last)
        assert self.exit_code is not None
        return self.exit_code

    def _turn(self) -> None:
        busy = self.engine.turn() if self.engine else False
        for request in list(self.to_save):
            if self.engine and (parts := self.engine.trained(request.stage)):
                self.to_save.remove(request)
                self._save(parts, request)
        items = self.inbox.take(0.0 if busy else IDLE_SECONDS)
        if self.engine:  # only after a long wait does it matter for what
            self.doing = "training" if busy or items else f"waiting for {self.engine.waits_for()}"
        for item in items:
            if isinstance(item, Message):
                self._obey(item)
            elif isinstance(item, HistoryWritten):
                if self.checkpoints:
                    self.checkpoints.commit(item.request)
            elif self.engine:
                self._restoring(self.engine, self.engine.origin, partial(self.engine.handle, item))

    def _heard(self, message: ToWorker) -> None:
        """In the control channel's thread."""
        if isinstance(message, SendPlan):
            self.plan_arrived[message.plan.epoch] = time.monotonic()
        self.inbox.put(message)

    def _obey(self, message: Message) -> None:
        match message:
            case Welcome():
                self._begin(message)
            case HistoryEvents() if self.history:
                self.history.happened(message)
            case ProfileRequest():
                assert self.task is not None
                assert self.spec is not None
                sizes = trained_sizes(self.task) if self.spec.topology.shard_optimizer else ()
                self.control.send(Profile(costs=profile(self.task, self.spec), sizes=sizes))
            case ReportRequest() if self.engine:
                self.engine.report()
            case SendPlan(plan=plan):
                if self.engine:
                    arrived = self.plan_arrived.pop(plan.epoch, None)
                    self._restoring(self.engine, plan.origin, partial(self.engine.obey, plan, arrived))
            case TakeCheckpoint() if self.engine:
                self.engine.take_checkpoint(message)
            case KeepLastState() if self.engine:
                self.engine.keep_last_state(message)
            case LookAgain() if self.engine:
                self.engine.look_again(message)
            case CommitCheckpoint():
                self._commit(message)
            case FindCheckpoint() if self.checkpoints:
                self.checkpoints.find(message)
            case DropCopies(checkpoints=checkpoints):
                if self.engine:
                    self.engine.drop_copies(checkpoints)
                if self.checkpoints:
                    self.checkpoints.drop(checkpoints)
            case Save():
                self.to_save.append(message)
            case NoticeReceived(seconds=seconds):
                self.leave_by = min(self.leave_by, time.monotonic() + seconds)
                self.control.send(message)
            case Stop():
                self.control.send(Bye())
                self.exit_code = EXIT_DRAINED
            case Refused(reason=reason, message=text):
                logger.warning("%s is refused and ends: %s: %s", self.worker, reason, text)
                self.exit_code = EXIT_FENCED

    def _restoring(self, engine: Engine, origin: int, take_in: Callable[[], None]) -> None:
        """Take something in with which a worker may begin with that plan's checkpoint; say so if it cannot be read."""
        try:
            take_in()
        except RestoreError as error:
            logger.warning("the checkpoint of step %d is not read: %s", error.checkpoint.step, error)
            engine.forget()
            self.control.send(
                RestoreFailed(
                    origin=origin, checkpoint=error.checkpoint, message=str(error)[:MOST_TEXT], damaged=error.damaged
                )
            )

    def _begin(self, welcome: Welcome) -> None:
        if self.engine:  # the channel was cut, or the coordinator restarted
            self.control.send(self._ready())
            if self.leave_by < math.inf:
                self.control.send(NoticeReceived(seconds=max(LEAST_SECONDS, self.leave_by - time.monotonic())))
            self.engine.report()
            if self.checkpoints:
                self.checkpoints.report()
            return
        spec = parse_manifest(welcome.manifest)
        loaded = load_task(spec.task.entrypoint, spec.task.config, shown_to_build(spec.training))
        task = self.task = settled(loaded, spec.training.seed)
        spec = self.spec = with_steps(spec, task)
        training = spec.training
        evaluations, made = evaluation_schedule(task, training), loggers_of(task, training)
        config = TrainingConfig.of(training)
        reader = self.reader = BatchReader(task, config.samples)
        devices = self.devices = choose_devices(self.worker, spec.worker.devices)
        use(devices[0], deterministic=training.deterministic)
        require_toolchain(training, gpu=devices[0].type == "cuda")
        if welcome.history:
            rates = Rates(batch=training.global_batch_size, tokens=tokens_of(task))
            loggers = LoggingThreads(made, facts_of(spec.name, welcome.history), welcome.history, self.control.send)
            self.history = HistoryKeeper(welcome.history, rates, self.control.send, loggers)
        channel = body_channel(spec.topology.transport, self.worker)
        by_device = copies_by_device(devices, partial(self.inbox.put, Copied()))
        copies = together(by_device)
        rate, flows = spec.redundancy.transfer_mbps * 1e6, spec.topology.flows_per_link
        self.transport.trust(welcome.secret, rate, flows, channel, copies.buffer)
        kept = self.checkpoints = Checkpointing(spec, len(task.layers), owner_of(welcome.secret), self.control.send)

        def build(index: int, stages: Sequence[tuple[int, int]], *, remembers: bool = True) -> Stage:
            device = devices[index % len(devices)]
            return Stage(task, index, stages, config, device, reader, by_device[device], remembers=remembers)

        self.engine = make_engine(
            Ports(
                worker=self.worker,
                steps=training.steps,
                build=build,
                build_whole=partial(build, 0, remembers=False),
                restore=kept.restore,
                keep=kept.keep,
                unwritten=kept.unwritten,
                new_id=lambda: secrets.token_hex(6),
                transport=self.transport,
                tell=self._tell,
                history=self.history or NoHistory(),
                observer=self.inside,
                clock=time.monotonic,
                order=StageOrder.of(spec.topology),
                on_host=spec.redundancy.placement is ReplicaPlacement.HOST,
                policy=StepPolicy.of(training, task),
                keep_copies=spec.checkpoint is not None and spec.checkpoint.keep_in_memory,
                host_memory=host_memory,
                evaluations=evaluations,
                verifies=spec.redundancy.verify is not VerifyMode.NONE,
                copies=copies,
            ),
            spec.worker.devices,
        )
        self.control.send(self._ready())

    def _ready(self) -> WorkerReady:
        assert self.task is not None
        assert self.spec is not None
        return WorkerReady(samples=dataset_length(self.task), steps=self.spec.training.steps)

    def _commit(self, request: CommitCheckpoint) -> None:
        """If this worker keeps the history, what leads to a checkpoint is in it before the checkpoint counts."""
        written = HistoryWritten(request)
        if self.history:
            self.history.when_written(partial(self.inbox.put, written))
        else:
            self.inbox.put(written)

    def _tell(self, message: Message) -> None:
        """The coordinator may end the job once the root's cell has finished; its history has to be written by then."""
        if self.history and isinstance(message, CellFinished) and message.cell == ROOT:
            self.history.when_written(partial(self.control.send, message))
        else:
            self.control.send(message)

    def _save(self, parts: Sequence[Stage], request: Save) -> None:
        try:
            save_weights(parts, request, self.worker)
        except SaveError as error:
            self._fail("SaveFailed", str(error))
        else:
            self.control.send(Saved(stage=request.stage))

    def _fail(self, reason: str, message: str) -> None:
        self.control.send(WorkerFailed(reason=reason, message=message))
        self.exit_code, self.last = EXIT_FAILED, f"{reason}: {message}"

    def _hello(self) -> Hello:
        plan = self.engine.plan_told if self.engine else None
        return Hello(
            worker=self.worker, host=self.host, port=self.transport.port, zone=self.zone, pid=os.getpid(),
            platform=self.platform, plan=plan,
        )  # fmt: skip

    def _heartbeat(self) -> Heartbeat:
        """In the control channel's thread."""
        if self.engine is None:
            return Heartbeat(step=0, doing="starting")
        now = time.monotonic()
        memory, times = self.engine.meter.due(now), self.engine.times_due(now)
        inside, busy = self.inside.now()
        doing = f"{inside} for {busy:.0f} s" if busy > LONG_SECONDS else self.doing
        room = headroom(self.devices) if times else None
        traffic = self.traffic.now(self.engine.step, self.transport.sent) if memory else None
        step = self.engine.step
        return Heartbeat(step=step, doing=doing, memory=memory, busy=busy, times=times, headroom=room, traffic=traffic)

    def _on_term(self, *_: object) -> None:
        """SIGTERM is a notice; a second one ends the worker at once. A cloud's own notice may come before or after."""
        if self.terminated:
            os._exit(128 + signal.SIGTERM)
        self.terminated = True
        self.inbox.put(NoticeReceived(seconds=self.grace))

    def notice(self, notice: CloudNotice) -> None:
        """From any thread. What several notices mean is for the coordinator to decide."""
        self.inbox.put(NoticeReceived(seconds=notice.seconds))
