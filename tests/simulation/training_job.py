"""The real coordinator and the real engines in one thread, on an in-memory network with a virtual clock.

Everything is deterministic: a run is a function of the job's arguments.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
import torch

from bamboo_core.checkpoint.layout import CheckpointId, part_name
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.control import protocol
from bamboo_core.control.digests import add_digests
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import (
    AddWorkers,
    Emit,
    Finish,
    Outcome,
    PreemptionNotice,
    RemoveWorker,
    Send,
    Tick,
    WorkerLost,
)
from bamboo_core.coordinator.grids.choosing import SECONDS_PER_OPERATION
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import ReplicaPlacement
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.splits.speeds import StageTimes
from bamboo_core.planning.spot_checks import SpotSchedule
from bamboo_trainer.checkpoint.initial import FirstTask
from bamboo_trainer.checkpoint.layer_file import decode, encode
from bamboo_trainer.commit.commit_log import StepPolicy
from bamboo_trainer.commit.ports import NoHistory
from bamboo_trainer.engine.components import Components
from bamboo_trainer.engine.devices import make_engine
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.frames import CommonState
from bamboo_trainer.loading import ALONE, load_task
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies, copies_by_device, together
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.stage.stage_states import StageState
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.task import Task, TrainingFacts
from bamboo_trainer.tasks.evaluation import evaluation_schedule
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.tasks.ties import settled
from bamboo_trainer.training import TrainingConfig, shown_to_build, with_steps
from manifest_kit import bamboojob, training
from memory_transport import MemoryNetwork
from played_job import PlayedJob
from sim_worker import Killed
from stage_kit import state_of

NOT_TOLD = ("bamboo_trainer.models.gpt:build", "bamboo_trainer.models.mlp:build")  # about the training
OPERATIONS = 1e6  # of each layer, which a worker of a cluster counts


@cache
def model(entrypoint: str, config: str, seed: int, training: TrainingFacts) -> Task:
    """Return a task of the model library or of plain_models, loaded and prepared as workers prepare it. Cached."""
    return settled(load_task(entrypoint, json.loads(config), training), seed)


@dataclass(frozen=True, slots=True)
class Fault:
    """The start or, with `after`, the end of an instruction. A job's `faults` kill the first worker that gets there."""

    name: str
    cell: Cell
    step: int
    microbatch: int = 0
    after: bool = False


@dataclass
class Node:
    """A worker of the job. inside: the components of its engine, once it has a plan."""

    name: str
    engine: Engine
    events: deque[Any] = field(default_factory=deque)
    alive: bool = True

    @property
    def inside(self) -> Components:
        assert self.engine.components is not None
        return self.engine.components

    @property
    def states(self) -> dict[int, StageState]:
        return self.inside.states.by_stage


class MemoryStore:
    """A checkpoint store in memory: layers' files, encoded as workers write them, and the committed checkpoints."""

    def __init__(self) -> None:
        self.files: dict[tuple[CheckpointId, int], bytes] = {}
        self.committed: list[CheckpointId] = []
        self.scores: dict[CheckpointId, float | None] = {}
        self.common: dict[CheckpointId, CommonState] = {}
        self.read: list[tuple[int, int]] = []  # steps and layers

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState]) -> protocol.PartsWritten:
        parts = []
        for layer, state in states.items():
            data = self.files[checkpoint, layer] = b"".join(encode(state))
            sha256 = hashlib.sha256(data).hexdigest()
            parts.append(CheckpointPart(layer=layer, file=part_name(layer), bytes=len(data), sha256=sha256))
        common = msgspec.to_builtins(next(iter(states.values())).common)
        return protocol.PartsWritten(checkpoint=checkpoint, parts=tuple(parts), common=common)

    def commit(self, request: protocol.CommitCheckpoint) -> protocol.CheckpointCommitted:
        for part in request.parts:
            data = self.files[request.checkpoint, part.layer]
            assert hashlib.sha256(data).hexdigest() == part.sha256
        self.committed.append(request.checkpoint)
        self.scores[request.checkpoint] = request.score
        self.common[request.checkpoint] = msgspec.convert(request.common, CommonState)
        return protocol.CheckpointCommitted(checkpoint=request.checkpoint, tidied=True)

    def find(self, request: protocol.FindCheckpoint) -> protocol.CheckpointFound:
        usable = [one for one in self.committed if one not in request.bad]
        return protocol.CheckpointFound(number=request.number, checkpoint=max(usable, default=None))

    def restore(
        self, values: StageValues, checkpoint: CheckpointId, here: Mapping[int, LayerState]
    ) -> Mapping[int, LayerState]:
        lacking = [layer for layer in values.layers_needed() if layer not in here]
        common = self.common[checkpoint]
        read = {layer: replace(decode(self.files[checkpoint, layer]), common=common) for layer in lacking}
        self.read += [(checkpoint.step, layer) for layer in lacking]
        values.restore({**here, **read})
        return read


@dataclass
class ToCoordinator:
    """A worker's channel to the coordinator; implements `Coordinator`."""

    inbox: "deque[Any]"
    worker: str

    def tell(self, message: protocol.Message) -> None:
        self.inbox.append(Received(self.worker, message))


@dataclass(frozen=True)
class FilesOfWorker:
    """A worker's checkpoint files; implements `CheckpointFiles`."""

    store: MemoryStore
    coordinator: "ToCoordinator"

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState], seconds: float) -> None:
        self.coordinator.tell(self.store.keep(checkpoint, states))

    def restore(
        self, values: StageValues, checkpoint: CheckpointId, here: Mapping[int, LayerState]
    ) -> Mapping[int, LayerState]:
        return self.store.restore(values, checkpoint, here)


@dataclass(frozen=True)
class StagesOfWorker:
    """A worker's builder of stages; implements `StageBuilder`."""

    job: "Job"
    worker: str
    config: TrainingConfig
    first: FirstTask

    def stage(self, index: int, stages: Sequence[tuple[int, int]], *, begins: bool = False) -> Stage:
        if self.job.spec.task.initial_from is None:
            return self.job.stage(self.worker, index, stages, self.config)
        task = self.first.get() if begins else self.job.task
        reader = self.job.reader(task, self.config)
        return build_stage(task, index, stages, self.config, self.job.computes_on[0], reader)


class Watch:
    """The observer of one worker, which records its instructions, and raises Killed at those of the job's faults."""

    def __init__(self, job: "Job", worker: str) -> None:
        self.job, self.worker = job, worker

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.strike(Fault(name, cell, step, microbatch))

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.strike(Fault(name, cell, step, microbatch, after=True))

    def event(self, name: str, **facts: object) -> None:
        pass

    def strike(self, fault: Fault) -> None:
        self.job.executed.append(fault)
        self.job.executed_by[self.worker].append(fault)
        if self.job.strikes(fault):
            raise Killed


class Job(PlayedJob):
    """One simulated job.

    decide: called before every turn; may kill workers or give them notice. capacity: the most workers alive at once;
    further requests wait. store: the checkpoint store; None: a new one. devices: names; stages use them in turn.
    copies: makes a worker's host copies on the CPU. per_worker: devices of a worker, each with a part of its stage;
    None: the manifest's. layer_seconds: reported per layer; None: measured. task: used instead of a user's entrypoint.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        faults: tuple[Fault, ...] = (),
        decide: Callable[["Job"], None] = lambda job: None,
        capacity: int = 1000,
        devices: Sequence[str] = ("cpu",),
        store: MemoryStore | None = None,
        copies: Callable[[], HostCopies] = AtOnce,
        per_worker: int | None = None,
        layer_seconds: float | None = None,
        task: Task | None = None,
    ) -> None:
        self.copies, self._layer_seconds = copies, layer_seconds
        self.store = store or MemoryStore()
        self.computes_on = tuple(map(torch.device, devices))
        self.manifest, spec = manifest, parse_manifest(manifest)
        self.spec = replace(spec, worker=replace(spec.worker, devices=per_worker or spec.worker.devices))
        named, seed = self.spec.task, self.spec.training.seed
        training = shown_to_build(self.spec.training)
        self._is_ours = named.entrypoint.startswith(("bamboo_trainer.models.", "plain_models:"))
        if self._is_ours:
            told = ALONE if named.entrypoint in NOT_TOLD else training
            self.task = model(named.entrypoint, json.dumps(named.config), seed, told)
        else:
            self.task = settled(task or load_task(named.entrypoint, named.config, training), seed)
        self.faults, self.decide, self.capacity = list(faults), decide, capacity
        self.now, self.turns = 0.0, 0
        self.network = MemoryNetwork()
        self.nodes: dict[str, Node] = {}
        self._by_device = defaultdict[str, dict[torch.device, HostCopies]](  # of each worker
            lambda: copies_by_device(self.computes_on, lambda: None)
        )
        self.started, self.wanted = 0, 0
        self.finish: Finish | None = None
        self.emitted: list[Emit] = []
        self.executed: list[Fault] = []
        self.executed_by: defaultdict[str, list[Fault]] = defaultdict(list)
        self.inbox: deque[Any] = deque()
        self.documented, self.spec = self.spec, with_steps(self.spec, self.task)
        self.state = coordinator.initial(self.documented, manifest, secret="s", now=0.0)

    def run(self, limit: int = 200_000) -> "Job":
        while self.finish is None:
            self.turns += 1
            assert self.turns < limit, f"no end after {limit} turns: {self.where()}"
            self.now += 0.001
            self.decide(self)
            self._coordinate(Tick())
            while self.inbox and self.finish is None:
                self._coordinate(self.inbox.popleft())
            self._staff()
            self.network.pump()
            for node in list(self.nodes.values()):
                self._turn(node)
        return self

    def strikes(self, fault: Fault) -> bool:
        """Return whether a fault is planned for this instruction, and drop the fault: it kills the worker now."""
        if fault not in self.faults:
            return False
        self.faults.remove(fault)
        return True

    def reader(self, task: Task, config: TrainingConfig) -> BatchReader | None:
        """Return the reader of a stage's batches; None if the stage makes its own."""
        return None

    def stage(self, worker: str, stage: int, stages: Sequence[tuple[int, int]], config: TrainingConfig) -> Stage:
        """Return a stage of a worker in its first state."""
        device = self.computes_on[stage % len(self.computes_on)]
        values = StageValues(self.task, stage, stages, config, device, self._by_device[worker][device])
        return Stage(values, self.reader(self.task, config), self._by_device[worker][device])

    def where(self) -> str:
        lines = [
            f"plan {self.state.plan}",
            f"synced {sorted(self.state.plans.synced)}",
            f"applied {sorted(self.state.plans.applied)}",
        ]
        for node in self.nodes.values():
            if node.alive:
                parts = node.engine.components
                steps = {c: (s.step, s.done, s.next) for c, s in parts.executor.cells.items()} if parts else {}
                lines.append(f"{node.name} epoch {parts.plan.current.epoch if parts else 0} {steps}")
        return "\n".join(lines)

    def kill(self, name: str) -> None:
        node = self.nodes[name]
        if node.alive:
            node.alive = False
            self.network.kill(name)
            self.inbox.append(WorkerLost(name, "killed"))

    def notice(self, name: str, seconds: float = 1e6) -> None:
        self.inbox.append(PreemptionNotice(name, seconds))

    def _turn(self, node: Node) -> None:
        if not node.alive:
            return
        try:
            for record in list(self.state.workers):
                if record == node.name:
                    times = self._times(node)
                    beat = protocol.Heartbeat(step=node.engine.step, times=times)
                    self.inbox.append(Received(node.name, beat))
            while node.events:
                item = node.events.popleft()
                if isinstance(item, protocol.ReportRequest):
                    node.engine.report()
                elif isinstance(item, protocol.SendPlan):
                    node.engine.obey(item.plan)
                elif isinstance(item, protocol.TakeCheckpoint):
                    node.engine.take_checkpoint(item)
                elif isinstance(item, protocol.KeepLastState):
                    node.engine.keep_last_state(item)
                elif isinstance(item, protocol.HoldState):
                    node.engine.hold(item.checkpoint)
                elif isinstance(item, protocol.DropCopies):
                    node.engine.drop_copies(item.checkpoints)
                elif isinstance(item, protocol.CommitCheckpoint):
                    self.inbox.append(Received(node.name, self.store.commit(item)))
                elif isinstance(item, protocol.FindCheckpoint):
                    self.inbox.append(Received(node.name, self.store.find(item)))
                elif isinstance(item, protocol.ProfileRequest):
                    self.inbox.append(Received(node.name, protocol.Profile(costs=self._costs())))
                elif not isinstance(item, protocol.Message):
                    node.engine.handle(item)
            node.engine.turn()
        except Killed:
            self.kill(node.name)

    def _times(self, node: Node) -> tuple[StageTimes, ...] | None:
        """Return the stage times that the worker reports: measured ones (None: not due) or those of `layer_seconds`."""
        plan, seconds = self.state.plan, self._layer_seconds
        if seconds is None or plan is None:
            return node.engine.times_due(self.now)
        owned = [plan.stages[cell.stage] for cell in plan.owned_by(node.name)]
        return tuple(
            StageTimes(
                layers=layers,
                forward=seconds * (layers[1] - layers[0]) / 3,
                backward=2 * seconds * (layers[1] - layers[0]) / 3,
                each=(),
                microbatches=32,
            )
            for layers in owned
        )

    def _costs(self) -> tuple[float, ...]:
        seconds = self._layer_seconds
        operations = OPERATIONS if seconds is None else seconds / SECONDS_PER_OPERATION
        return (operations,) * len(self.task.layers)

    def _coordinate(self, event: Any) -> None:
        self.state, commands = coordinator.step(self.state, event, self.now)
        for command in commands:
            match command:
                case Send(worker, message) if worker in self.nodes:
                    self.nodes[worker].events.append(message)
                case AddWorkers(count):
                    self.wanted += count
                case RemoveWorker(worker):
                    self.nodes[worker].alive = False
                    self.network.kill(worker)
                    self.inbox.append(WorkerLost(worker, "removed"))
                case Emit():
                    self.emitted.append(command)
                case Finish():
                    self.finish = command

    def _staff(self) -> None:
        while self.wanted and sum(node.alive for node in self.nodes.values()) < self.capacity:
            self.wanted -= 1
            self._add()

    def _add(self) -> None:
        name = f"w{self.started}"
        self.started += 1
        training = self.spec.training
        config = TrainingConfig.of(training)
        events: deque[Any] = deque()

        coordinator = ToCoordinator(self.inbox, name)

        def told(text: str) -> None:
            coordinator.tell(protocol.WorkerWarning(reason=protocol.INITIAL_WEIGHTS, message=text))

        on_cpu = all(device.type == "cpu" for device in self.computes_on)
        engine = make_engine(
            Ports(
                worker=name,
                steps=training.steps,
                builder=StagesOfWorker(self, name, config, FirstTask(self.spec.task.initial_from, self.task, told)),
                files=FilesOfWorker(self.store, coordinator),
                new_id=lambda: f"{name}t{self.turns}",
                transport=self.network.attach(name, events.append),
                copies=self.copies() if on_cpu else together(self._by_device[name]),
                coordinator=coordinator,
                history=NoHistory(),
                observer=Watch(self, name),
                clock=lambda: self.now,
                work_clock=lambda: self.now,
                on_host=self.spec.redundancy.placement is ReplicaPlacement.HOST,
                policy=StepPolicy.of(training, self.task),
                evaluations=evaluation_schedule(self.task, training),
                spots=SpotSchedule() if config.deterministic else None,
                deterministic=config.deterministic,
            ),
            self.spec.worker.devices,
        )
        self.nodes[name] = Node(name, engine, events)
        self.inbox.append(WorkerJoined(protocol.Hello(worker=name, host="memory", port=1)))
        self.inbox.append(Received(name, protocol.WorkerReady(samples=len(self.task.dataset), steps=training.steps)))

    @property
    def bits(self) -> str:
        """The digest of the whole model's last state, equal on any grid; the job must be complete."""
        assert self.outcome is Outcome.COMPLETE, (self.finish, self.emitted[-5:])
        return add_digests({cell.stage: digest for cell, digest in self.state.ending.finished}.values())

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(digest for cell, digest in self.state.ending.finished if cell.pipeline == 0)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that the owners hold; a replica may still be one step behind."""
        held = (state for node in self.nodes.values() for state in node.states.values())
        return state_of(state.stage for state in held if state.stage and state.owned)


def job_of(task: Task, grid: tuple[int, int], steps: int, mode: str = "Replicas", **numbers: Any) -> Job:
    """Return a job that trains this task. numbers: further fields of the manifest's training."""
    document = bamboojob(
        task={"entrypoint": "given:build"},
        training=training(steps, 8, 2, **{"maxGradientNorm": 1.0, **numbers}),
        topology={"stages": grid[0], "pipelines": grid[1], "schedule": "1F1B"},
        redundancy={"mode": mode},
    )
    return Job(document, task=task)


def check_same_bits(first: Job, *others: Job) -> None:
    """Check that all jobs complete after their faults, with the losses and weights of the first, on any grid."""
    for job in (first, *others):
        assert job.outcome is Outcome.COMPLETE, job.emitted
        assert not job.faults, "it did not strike"
        assert job.state.progress.losses == first.state.progress.losses
        assert add_digests(job.digests) == add_digests(first.digests)


def one_of_each_kind(
    executed: Iterable[Fault], kind: Callable[[Fault], object] = lambda fault: fault.name
) -> set[Fault]:
    """Return one executed instruction of each kind, not always the first. kind: returns the kind of an instruction."""
    by_kind: dict[object, list[Fault]] = {}
    for fault in dict.fromkeys(executed):
        by_kind.setdefault(kind(fault), []).append(fault)
    return {faults[number * 5 % len(faults)] for number, faults in enumerate(by_kind.values())}
