"""What the parts of an engine use: the other parts of the worker, and what they share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.spot_checks import SpotSchedule
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.commit.history import History, NoHistory
from bamboo_trainer.commit.step_policy import APPLIES_ALL, StepPolicy
from bamboo_trainer.engine.layer_copies import CheckpointFiles
from bamboo_trainer.engine.observer import Observer
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.engine.steps.device_times import DeviceTimes
from bamboo_trainer.memory.cgroup import HostMemory
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.stage_states import StageBuilder, StageStates
from bamboo_trainer.tasks.evaluation import EvaluationSchedule
from bamboo_trainer.transport.base import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The collaborators of an engine. builder: builds stages. files: of checkpoints.

    new_id: makes the id of an attempt to write a checkpoint. host_memory: size and use of it. copies: of tensors to
    send, in host memory; each asynchronous one leads to a `Copied` event. clock: seconds. work_clock: without those in
    which the engine's thread waited for a processor. on_host: states kept only for others stay in host memory. policy:
    for steps that are not finite. evaluations: which states are evaluated. history: is told of commits. spots: which
    microbatches are checked; None: none. deterministic: see `training.deterministic`. devices: of the worker; each
    stage runs as that many parts.
    """

    worker: WorkerId
    steps: int
    builder: StageBuilder
    files: CheckpointFiles
    transport: Transport
    coordinator: Coordinator
    new_id: Callable[[], str]
    observer: Observer
    clock: Callable[[], float]
    work_clock: Callable[[], float]
    on_host: bool = False
    policy: StepPolicy = APPLIES_ALL
    evaluations: EvaluationSchedule | None = None
    host_memory: Callable[[], HostMemory | None] = lambda: None
    history: History = field(default_factory=NoHistory)
    spots: SpotSchedule | None = None
    copies: HostCopies = field(default_factory=AtOnce)
    deterministic: bool = True
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What all parts of an engine share. plan: the plans known here. states: of the stages held here. committer: knows
    the commits and the layouts of steps. timer, devices: measure work.
    """

    ports: Ports
    plan: PlanState
    outbox: Outbox
    states: StageStates
    committer: Committer
    timer: StageTimer
    devices: DeviceTimes

    @property
    def log(self) -> CommitLog:
        return self.committer.log

    @property
    def steps(self) -> int:
        """The number of the job's steps: the requested ones, or those before an early stop."""
        end = self.log.end
        return self.ports.steps if end is None else end
