"""One simulated worker: the real Engine between a simulated transport and a simulated control channel.

Like the loop of `bamboo_trainer.worker.agent.WorkerAgent`, each turn handles what has arrived and then does one piece
of work. Time is virtual; a piece of work takes a random time.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Message
from bamboo_core.planning.plan import ROOT, Cell
from bamboo_core.planning.spot_checks import SpotSchedule
from bamboo_trainer.commit.commit_log import StepPolicy
from bamboo_trainer.commit.ports import NoHistory
from bamboo_trainer.engine.devices import make_engine
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.frames import Frame
from bamboo_trainer.memory.host_copies import AtOnce, Copied, Copy, Parts
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.worker.history_keeper import Rates
from history_worker import HistoryWorker, Steps
from sim_arithmetic import Oracle
from sim_clock import Clock
from sim_control import Channel
from sim_history import SimHistoryFiles
from sim_network import End, Network
from sim_stage import StandIn, StandInValues
from sim_store import SimStore

SECONDS = {
    "Evaluate": 1e-3,
    "Forward": 1e-3,
    "Backward": 2e-3,
    "BackwardInput": 1e-3,
    "BackwardWeight": 1e-3,
    "BackwardRest": 1e-3,
    "OptimizerStep": 1e-3,
    "ReplicaUpdate": 1e-3,
}
OTHER_SECONDS = 2e-4
LOAD_SECONDS = 0.3
LAYER_SECONDS = 5e-3  # for a layer's forward, where times are measured
HISTORY_SECONDS = (0.005, 0.3)  # from one turn of a worker's history to the next
NOTICE = protocol.NoticeReceived(seconds=30.0)


class Name(str):
    """A worker's name. It has the same hash in every process, so that sets of names have the same order."""

    number: int

    def __new__(cls, number: int) -> "Name":
        name = super().__new__(cls, f"w{number}")
        name.number = number
        return name

    def __hash__(self) -> int:
        return self.number


class Killed(BaseException):
    """The death of a worker in the middle of its work, which no handler of the product catches."""


class Surroundings(Protocol):
    """The parts of the simulation that a worker uses."""

    clock: Clock
    rng: random.Random
    network: Network
    oracle: Oracle
    store: SimStore
    history: dict[str, bytes] | None  # the files of a history that a callback follows; None: no history

    work: tuple[float, ...]  # of each layer, if what workers measure is to say something
    copy_seconds: float  # 0: workers have no device
    devices: int  # of each worker, which runs its stage in as many parts

    def struck(self, node: "Node", what: str, cell: Cell, step: int, microbatch: int) -> bool: ...
    def sending(self, node: "Node", peer: str, frame: Frame) -> bool: ...
    def turned(self, node: "Node") -> None: ...
    def ended(self, node: "Node", code: int | None) -> None: ...
    def broken(self, node: "Node", error: Exception) -> None: ...


class SimCopy:
    """A copy of tensors as they are at its start. It is ready at the time `at`, like a copy on a GPU's stream."""

    def __init__(self, parts: Parts, clock: Clock, at: float) -> None:
        self._parts, self._clock, self._at = parts, clock, at

    def ready(self) -> bool:
        return self._clock.now >= self._at

    def wait(self) -> Parts:
        return self._parts


class SimCopies(AtOnce):
    """The host copies of a device. Each is ready after a random delay, and then wakes its worker."""

    def __init__(self, node: "Node") -> None:
        super().__init__()
        self._node = node

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        around, parts = self._node.around, tuple(tensor.clone() for tensor in tensors)
        seconds = around.copy_seconds * around.rng.uniform(0.5, 2.0) if parts else 0.0
        if parts:
            around.clock.after(seconds, partial(self._node.put, Copied()))
        return SimCopy(parts, around.clock, around.clock.now + seconds)


class Late:
    """An inbox item: the delay before a late worker answers a report request is over."""


class Node:
    """A worker's process.

    slow: a factor on the time of layers, if `work` sets that time. speed: a factor on the time of all other work. late:
    seconds before it answers a report request. spent: seconds of layers' work in this turn, added to its clock.
    """

    def __init__(
        self,
        around: Surroundings,
        name: str,
        channel: Callable[["Node"], Channel],
        costs: tuple[float, ...],
        late: float,
    ) -> None:
        self.around, self.name, self.costs, self.late = around, name, costs, late
        self.speed = 10 ** around.rng.uniform(-0.3, 0.5)
        self.slow, self.spent = 1.0, 0.0
        self.inbox: deque[Any] = deque()
        self.engine: Engine | None = None
        self.transport: End = around.network.attach(name, self.put, self._on_send)
        self.alive, self.frozen, self.notified, self.asleep = True, False, False, True
        self.exit_code: int | None = None
        self.told: list[Message] = []  # the last four about checkpoints
        self.last = ""  # instruction
        self.hangs = 0.0  # seconds that the next instruction takes longer
        self.stuck_at: float | None = None  # since when it is inside one that hangs
        self.channel = channel(self)
        self.history: HistoryWorker | None = None
        if around.history is not None:
            files, rates = SimHistoryFiles(around.history, self._writes_history), Rates(batch=1)
            self.history = HistoryWorker(files, rates, {"steps": Steps}, self._say)
            around.clock.after(around.rng.uniform(*HISTORY_SECONDS), self._keep_history)

    # the surroundings' side

    def put(self, item: object) -> None:
        self.inbox.append(item)
        if self.asleep and self.alive and not self.frozen:
            self.asleep = False
            self.around.clock.after(0.0, self._wake)

    def term(self) -> None:
        """Give the worker a notice, as SIGTERM does; a second one changes nothing."""
        if self.alive and not self.notified:
            self.notified = True
            self.put(NOTICE)

    def freeze(self, frozen: bool) -> None:
        if not self.alive:
            return
        self.frozen = frozen
        self.channel.freeze(frozen)
        self.around.network.freeze(self.name, frozen)
        if not frozen:
            self.asleep = False
            self.around.clock.after(0.0, self._wake)

    def end(self, code: int | None, silent: float = 0.0) -> None:
        """End the process. silent: seconds until other workers and the coordinator see closed connections, as after
        the loss of its node.
        """
        if not self.alive:
            return
        self.alive = False
        clean = code == 0
        self.around.network.leave(self.transport, flush=clean, silent=silent)
        self.channel.die(silent + self.around.rng.uniform(0.0, 0.05), flush=code in (0, 1))
        self.around.ended(self, code)

    def heartbeat(self) -> protocol.Heartbeat:
        """Return the heartbeat. It needs no turn, since a real worker sends it from another thread than its loop."""
        busy = 0.0 if self.stuck_at is None else self.around.clock.now - self.stuck_at
        step, times = 0, None
        if self.engine:
            step, times = self.engine.step, self.engine.times_due(self.around.clock.now)
        return protocol.Heartbeat(step=step, doing=f"inside {self.last}", busy=busy, times=times)

    # the history, which another thread keeps

    def _keep_history(self) -> None:
        if not self.alive:
            return
        try:
            if self.history and not self.frozen:
                self.history.turn()
        except Killed:
            self.end(-9)
            return
        self.around.clock.after(self.around.rng.uniform(*HISTORY_SECONDS), self._keep_history)

    def _writes_history(self, moment: str) -> None:
        if self.around.struck(self, f"{moment} WriteHistory", ROOT, self.engine.step if self.engine else 0, 0):
            raise Killed

    def _say(self, message: Message) -> None:
        """Send a message to the coordinator. The root sends the end of its cell only when the history is complete."""
        if self.history and isinstance(message, protocol.CellFinished) and message.cell == ROOT:
            self.history.keeper.when_written(partial(self.channel.tell, message), complete=True)
        else:
            self.channel.tell(message)

    # the worker's loop

    def _wake(self) -> None:
        self.stuck_at = None
        if not self.alive or self.frozen:
            self.asleep = True
            return
        busy = 0.0
        try:
            items = list(self.inbox)
            self.inbox.clear()
            for item in items:
                busy += self._take(item)
            if self.exit_code is None:
                busy += self._turn()
        except Killed:
            self.end(-9)
        except Exception as error:
            self.around.broken(self, error)
            return
        self.around.turned(self)
        if self.exit_code is not None:
            self.end(self.exit_code)
        elif busy:
            self.around.clock.after(busy, self._wake)
        elif self.inbox:
            self.around.clock.after(0.0, self._wake)
        else:
            self.asleep = True

    def _take(self, item: Any) -> float:
        """Handle one message or event, and return the seconds that this takes."""
        if not isinstance(item, Message | Late):
            if self.engine:
                self.engine.handle(item)
            return 0.0
        match item:
            case protocol.Welcome():
                return self._begin()
            case protocol.ProfileRequest():
                self.channel.tell(protocol.Profile(costs=self.costs))
            case protocol.ReportRequest() if self.late > 0:
                self.around.clock.after(self.late, partial(self.put, Late()))
            case protocol.ReportRequest() | Late():
                if self.engine:
                    self.engine.report()
            case protocol.SendPlan(plan=plan):
                if self.engine:
                    self.engine.obey(plan)
            case protocol.TakeCheckpoint():
                if self.engine:
                    self.engine.take_checkpoint(item)
            case protocol.KeepLastState():
                if self.engine:
                    self.engine.keep_last_state(item)
            case protocol.HoldState(checkpoint=checkpoint):
                if self.engine:
                    self.engine.hold(checkpoint)
            case protocol.HistoryEvents() if self.history:
                self.history.keeper.happened(item)
            case protocol.CommitCheckpoint() if self.history:
                self.history.keeper.when_written(partial(self.around.store.commit, self, item))
            case protocol.CommitCheckpoint():
                self.around.store.commit(self, item)
            case protocol.DropCopies(checkpoints=checkpoints):
                if self.engine:
                    self.engine.drop_copies(checkpoints)
            case protocol.FindCheckpoint():
                self.around.store.find(self, item)
            case protocol.NoticeReceived():
                self.channel.tell(item)
            case protocol.Stop():
                self.channel.tell(protocol.Bye())
                self.exit_code = 0
            case protocol.Refused():
                self.exit_code = 4
        return 0.0

    def stage(self, stage: int, stages: Sequence[tuple[int, int]], *, begins: bool = False) -> StandIn:
        """Return a stand-in for the stage in its first state."""
        return StandIn(StandInValues(self.around.oracle, stages, stage), self._spend)

    def restore(
        self, values: StandInValues, checkpoint: CheckpointId, here: Mapping[int, LayerState]
    ) -> Mapping[int, LayerState]:
        lacking = [layer for layer in values.layers_needed() if layer not in here]
        read = self.around.store.read(checkpoint, lacking) if lacking else {}
        values.restore({**here, **read})
        return read

    def _spend(self, layer: int, share: float) -> None:
        if self.around.work:
            self.spent += (
                LAYER_SECONDS * self.around.work[layer] * share * self.slow * self.around.rng.uniform(0.9, 1.1)
            )

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState], seconds: float) -> None:
        self.around.store.keep(self, checkpoint, states)

    def tell(self, message: Message) -> None:
        """Send a message about checkpoints. The last four such messages are sent again after each reconnection."""
        self.told = [*self.told[-3:], message]
        self.channel.tell(message)

    def _begin(self) -> float:
        if self.engine:
            self.channel.tell(protocol.WorkerReady())
            if self.notified:
                self.channel.tell(NOTICE)
            self.engine.report()
            for message in self.told:
                self.channel.tell(message)
            return 0.0
        self.engine = self._new_engine()
        self.channel.tell(protocol.WorkerReady())
        return LOAD_SECONDS * self.around.rng.random()

    def _new_engine(self) -> Engine:
        around = self.around
        return make_engine(
            Ports(
                worker=self.name,
                steps=around.oracle.arithmetic.wanted_steps,
                builder=self,  # type: ignore[arg-type]
                files=self,  # type: ignore[arg-type]
                new_id=around.store.new_id,
                transport=self.transport,
                coordinator=SimpleNamespace(tell=self._say),
                history=self.history.keeper if self.history else NoHistory(),
                observer=self,
                clock=lambda: around.clock.now + self.spent,
                work_clock=lambda: around.clock.now + self.spent,
                policy=StepPolicy(skips=bool(around.oracle.arithmetic.skipped)),
                evaluations=around.oracle.arithmetic.evaluations,
                spots=SpotSchedule(early=range(200)),
                copies=SimCopies(self) if around.copy_seconds else AtOnce(),
            ),
            around.devices,
        )

    def _turn(self) -> float:
        if self.engine is None:
            return 0.0
        self.last = ""
        busy = self.engine.turn()
        spent, self.spent = self.spent, 0.0
        if self.hangs and self.last in SECONDS:
            hangs, self.hangs, self.stuck_at = self.hangs, 0.0, self.around.clock.now
            return hangs
        if spent:
            return spent
        typical = SECONDS.get(self.last, OTHER_SECONDS)
        return typical * self.speed * self.around.rng.uniform(0.5, 1.5) if busy else 0.0

    # what the engine is given

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.last = name
        if self.around.struck(self, f"before {name}", cell, step, microbatch):
            raise Killed

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        if self.around.struck(self, f"after {name}", cell, step, microbatch):
            raise Killed

    def event(self, name: str, **facts: object) -> None:
        pass

    def _on_send(self, peer: str, frame: Frame) -> None:
        if self.around.sending(self, peer, frame):
            raise Killed
