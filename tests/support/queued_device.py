"""Devices with queues in virtual time: one queue computes, one copies to the device, two copy from it.

Work begins when its queue is free and its inputs exist. The host, which all devices of a worker share, goes on
meanwhile, unless it waits for a copy or for the computing queue.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bamboo_trainer.memory.host_copies import AtOnce, Copy, Parts
from bamboo_trainer.stage.forwarding import Forwarding
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.stage.work import Gradients, Work
from bamboo_trainer.training import TrainingConfig
from training_job import Fault, Job, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The seconds that a stage's forward, a stage's backward and a copy take on a device."""

    forward: float
    backward: float
    copy: float = 0.0  # of an urgent copy, either way
    bulk: float = 0.0  # of another copy, and of each of its bytes
    bulk_byte: float = 0.0


class QueuedCopy:
    """A copy that is ready at `at` seconds. It has the values earlier, since this device computes values at once."""

    def __init__(self, device: "QueuedDevice", parts: Parts, at: float) -> None:
        self._device, self._parts, self._at = device, parts, at

    def ready(self) -> bool:
        return self._device.clock() >= self._at

    def wait(self) -> Parts:
        self._device.host.hold(self._at)
        return self._parts


@dataclass
class QueuedHost:
    """The host that a worker's devices share. Times are seconds of the virtual clock.

    held: the end of the host's newest wait. waits: number of its waits. made: by handed-over tensor, when its values
    exist. latest: number of the device that got work last.
    """

    clock: Callable[[], float]
    devices: list["QueuedDevice"] = field(default_factory=list)
    held: float = 0.0
    waits: int = 0
    made: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    latest: int = 0

    def hold(self, until: float) -> None:
        if until > self.clock():
            self.held, self.waits = max(self.held, until), self.waits + 1


class QueuedCopies(AtOnce):
    """The copies of all devices of a worker. The device that got work last makes each copy."""

    def __init__(self, host: QueuedHost) -> None:
        super().__init__()
        self._host = host

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        return self._host.devices[self._host.latest].start(tensors, bulk=bulk)

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        return self._host.devices[self._host.latest].hand_over(tensors)


@dataclass(frozen=True, slots=True)
class Ran:
    """Work of a stage, from `begin` to `end` in seconds. given: when the host gave it to the device."""

    stage: int
    given: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class QueuedMark:
    """A mark in a device's queue, which the device passes at `at` seconds."""

    clock: Callable[[], float]
    at: float

    def done(self) -> bool:
        return self.clock() >= self.at

    def since(self, earlier: "QueuedMark") -> float:
        assert self.done()
        assert self.at >= earlier.at
        return self.at - earlier.at


class QueuedDevice(AtOnce):
    """One device of a worker. ran: its work so far."""

    def __init__(self, host: QueuedHost, number: int, speed: Speed) -> None:
        super().__init__()
        self.host, self.clock, self.speed, self._number = host, host.clock, speed, number
        self.ran: list[Ran] = []
        self._computes, self._inward = 0.0, 0.0  # until when each queue is busy
        self._outward = {False: 0.0, True: 0.0}

    def run(self, stage: int, seconds: float) -> None:
        self.host.latest = self._number
        begin = max(self.clock(), self._computes)
        self._computes = begin + seconds
        self.ran.append(Ran(stage, self.clock(), begin, self._computes))

    def mark(self) -> QueuedMark:
        self.host.latest = self._number
        return QueuedMark(self.clock, max(self.clock(), self._computes))

    def hand_over(self, tensors: Iterable[Tensor]) -> Parts:
        parts = tuple(tensor.detach() for tensor in tensors)
        for part in parts:
            self.host.made[part] = max(self.clock(), self._computes)
        return parts

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        parts = tuple(tensor.detach().clone() for tensor in tensors)
        if not parts:
            return super().start(parts)
        begin = max(self.clock(), self._computes, self._outward[bulk])
        size = sum(part.nbytes for part in parts)
        self._outward[bulk] = begin + (self.speed.bulk + size * self.speed.bulk_byte if bulk else self.speed.copy)
        return QueuedCopy(self, parts, self._outward[bulk])

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        parts = tuple(tensors)
        if parts:
            made = max(self.host.made.get(part, 0.0) for part in parts)  # type: ignore[no-untyped-call]
            self._inward = max(self.clock(), self._inward, made) + self.speed.copy
            self._computes = max(self._computes, self._inward)
        return parts

    def wait(self) -> None:
        self.host.hold(self._computes)


class QueuedStage(Stage):
    """A stage that computes its values at once, and spends the work's time on the device."""

    def __init__(self, values: StageValues, device: QueuedDevice, speed: Speed) -> None:
        super().__init__(values, copies=device)
        self._queues, self._speed = device, speed

    def _spend(self, seconds: float) -> None:
        self._queues.run(self.values.index, seconds)

    @property
    def runs_ahead(self) -> bool:
        return True

    def wait(self) -> None:
        self._queues.wait()

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        outputs = super().forward(work, step, microbatch, inputs)
        self._spend(self._speed.forward)
        return outputs

    def advance(self, forwarding: Forwarding) -> None:
        super().advance(forwarding)
        self._spend(self._speed.forward / len(self.values.layers))

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Gradients | None, *, postpone: bool = False
    ) -> Gradients:
        inputs = super().backward(work, step, microbatch, gradients, postpone=postpone)
        self._spend(self._speed.backward * (1.0 if work.parts is None else self._part))
        return inputs

    def backward_rest(self, work: Work, step: int, microbatch: int) -> None:
        left = work.parts is not None
        super().backward_rest(work, step, microbatch)
        if left:
            self._spend(self._speed.backward * self._part)

    @property
    def _part(self) -> float:
        """The share of a whole backward's time that one of its parts takes. All parts take the same time."""
        return 1 / len({bucket.layer for bucket in self.values.parameters.buckets})


class QueuedJob(Job):
    """A job whose workers have devices with queues.

    at: when the host began or finished each instruction. speeds: by stage; others have `speed`. per_worker: devices.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        speed: Speed,
        per_worker: int = 1,
        speeds: Mapping[int, Speed] | None = None,
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self.speed, self.hosts, self.at = speed, list[QueuedHost](), dict[Fault, float]()
        self._speeds, self._devices = speeds or {}, per_worker
        self.waits: dict[int, int] = {}  # by step, of all hosts until its optimizer step on the first stage
        super().__init__(manifest, faults, copies=self._new_host, per_worker=per_worker)

    def _new_host(self) -> QueuedCopies:
        host = QueuedHost(lambda: self.now)
        host.devices += [QueuedDevice(host, number, self.speed) for number in range(self._devices)]
        self.hosts.append(host)
        return QueuedCopies(host)

    def host_of(self, worker: str) -> QueuedHost:
        """Return the host of worker "wN": host number N, from 0, in the order of their creation."""
        return self.hosts[int(worker.removeprefix("w"))]

    def stage(self, worker: str, stage: int, stages: Sequence[tuple[int, int]], config: TrainingConfig) -> Stage:
        device = self.host_of(worker).devices[stage % self._devices]
        values = StageValues(self.task, stage, stages, config, copies=device)
        return QueuedStage(values, device, self._speeds.get(stage, self.speed))

    def strikes(self, fault: Fault) -> bool:
        self.at[fault] = self.now
        if fault.name == "OptimizerStep" and fault.after and fault.cell == (0, 0):
            self.waits[fault.step] = sum(host.waits for host in self.hosts)
        return super().strikes(fault)

    def step_seconds(self, step: int) -> float:
        """Return the seconds between the first stage's optimizer steps of `step` - 1 and of `step`."""
        ends = [self.at[Fault("OptimizerStep", (0, 0), k, after=True)] for k in (step - 1, step)]
        return ends[1] - ends[0]

    def _turn(self, node: Node) -> None:
        if self.host_of(node.name).held <= self.now:
            super()._turn(node)
