"""What an engine is given: its worker's other parts, the network, the clock, and where states come from."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bamboo.control.protocol import Message
from bamboo.control.verification import ForwardPlace
from bamboo.planning.plan import CheckpointId, WorkerId
from bamboo.planning.spot_checks import SpotSchedule
from bamboo_trainer.commit.checkpoint_shares import Hold, Keep
from bamboo_trainer.commit.history import History, NoHistory
from bamboo_trainer.commit.step_policy import APPLIES_ALL, StepPolicy
from bamboo_trainer.engine.observer import Observer
from bamboo_trainer.memory.cgroup import HostMemory
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.stage_states import Build, BuildWhole
from bamboo_trainer.stage.state.layer_state import LayerState
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.tasks.evaluation import EvaluationSchedule
from bamboo_trainer.transport.base import Transport

Restore = Callable[[StageValues, CheckpointId, Mapping[int, LayerState]], Mapping[int, LayerState]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What an engine is given. build: makes a stage, in the state before the first step; build_whole: a model of one
    stage, without what an optimizer remembers. tell: to the coordinator.

    restore: takes a checkpoint's state over; it is given the layers that are here, reads the others from the store, and
    returns what it has read. keep: writes layers of a checkpoint, whose states it is given; new_id: of an attempt to
    write one; unwritten: copies of layers for that, which wait. keep_copies: of the newest checkpoint, in host memory.
    host_memory: how much of that there is. copies: of what is sent, in host memory; who makes them later has `Copied`
    handled when one is there.
    clock: seconds; work_clock: without those in which the engine's thread waited for a processor.
    lookahead: see `StageOrder`. on_host: what is kept for others only waits in host memory.
    policy: for steps that are not finite. evaluations: of which states. history: is told of commits. verifies: results
    that are there twice are compared. spots: which microbatches are computed again; None: none. devices: of the worker,
    on which its stages are run in as many parts.
    """

    worker: WorkerId
    steps: int
    build: Callable[[int, Sequence[tuple[int, int]]], Stage]
    build_whole: BuildWhole
    restore: Restore
    transport: Transport
    tell: Callable[[Message], None]
    keep: Keep
    new_id: Callable[[], str]
    observer: Observer
    clock: Callable[[], float]
    work_clock: Callable[[], float]
    lookahead: int
    on_host: bool = False
    policy: StepPolicy = APPLIES_ALL
    evaluations: EvaluationSchedule | None = None
    keep_copies: bool = False
    host_memory: Callable[[], HostMemory | None] = lambda: None
    unwritten: Callable[[], Iterable[Tensor]] = tuple
    history: History = field(default_factory=NoHistory)
    verifies: bool = False
    spots: SpotSchedule | None = None
    copies: HostCopies = field(default_factory=AtOnce)
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePorts:
    """Where the states of stages come from and what is kept of them. build: makes a stage in its first state.

    begun: stages whose first state is there. hold: takes copies of layers before they are split anew. keep: takes those
    that a checkpoint is written from. copies: all that are held. questions: of the coordinator, by which forwards they
    are about; versions: by which states.
    """

    build: Build
    begun: Mapping[int, Stage]
    hold: Hold
    keep: Keep
    copies: Callable[[], Iterable[Tensor]]
    questions: Collection[ForwardPlace] = ()
    versions: Collection[int] = ()
