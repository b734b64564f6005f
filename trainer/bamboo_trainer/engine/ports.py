"""The collaborators of an engine: network, clock, states and others, and the observer to which it reports its work."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.spot_checks import SpotSchedule
from bamboo_trainer.commit.commit_log import APPLIES_ALL, StepPolicy
from bamboo_trainer.commit.ports import CommitContext, Coordinator, History, NoHistory
from bamboo_trainer.engine.layer_copies import CheckpointFiles
from bamboo_trainer.engine.stage_times import DeviceTimes, StageTimer
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies
from bamboo_trainer.memory.limits import HostMemory
from bamboo_trainer.stage.stage_states import StageBuilder
from bamboo_trainer.tasks.evaluation import EvaluationSchedule
from bamboo_trainer.transport.base import Transport


class Observer(Protocol):
    """An observer of instructions, optimizer steps, rehearsals and checks: telemetry, or the tests' fault injection.

    event: Idle (no required work is ready), Epoch (a new plan), Takeover (within a step), Move (between two steps).
    """

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None: ...

    def event(self, name: str, **facts: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The collaborators and settings of an engine. builder: builds stages. files: the files of checkpoints.

    new_id: makes the id of an attempt to write a checkpoint. host_memory: returns the limit and use, if known. copies:
    copies tensors to host memory to send them; each asynchronous copy leads to a `Copied` event. clock: seconds.
    work_clock: seconds without the time in which the engine's thread waited for a processor. on_host: optimizer states
    of replicas stay in host memory. policy: decides whether to skip a step with NaN or infinity. evaluations: which
    states are evaluated. history: records commits. spots: which microbatches are checked; None: none. deterministic:
    see `training.deterministic`. devices: number of the worker's devices; each stage is divided among them.
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
class EngineContext(CommitContext):
    """The collaborators that an engine's parts share. timer, devices: record how long stages and devices work."""

    ports: Ports
    timer: StageTimer
    devices: DeviceTimes

    @property
    def steps(self) -> int:
        """The number of the job's steps: the requested ones, or those before an early stop."""
        end = self.log.end
        return self.ports.steps if end is None else end
