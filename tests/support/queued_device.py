"""A device with queues in virtual time, without a GPU: one that computes, one of copies to it, two of copies from it.

What is started on a queue begins when the queue is free and what it takes is there, and takes a while. The host goes on
unless it waits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bamboo_trainer.memory.host_copies import AtOnce, Copy, Parts
from bamboo_trainer.stage.forwarding import Forwarding
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.stage.work import Work
from bamboo_trainer.training import TrainingConfig
from training_job import Fault, Job, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds."""

    forward: float
    backward: float
    copy: float = 0.0  # of what is urgent, either way
    bulk: float = 0.0  # of what is not; and of each byte of it
    bulk_byte: float = 0.0


class QueuedCopy:
    """A copy of what its originals are when it is started, as their values are computed at once here."""

    def __init__(self, device: "QueuedDevice", parts: Parts, at: float) -> None:
        self._device, self._parts, self._at = device, parts, at

    def ready(self) -> bool:
        return self._device.clock() >= self._at

    def wait(self) -> Parts:
        self._device.hold(self._at)
        return self._parts


class QueuedDevice(AtOnce):
    """The device of one worker. held: until when its host waits. waits: how often it had to."""

    def __init__(self, clock: Callable[[], float], speed: Speed) -> None:
        super().__init__()
        self.clock, self.speed = clock, speed
        self.held, self.waits = 0.0, 0
        self._computes, self._inward = 0.0, 0.0  # until when each queue is busy
        self._outward = {False: 0.0, True: 0.0}

    def run(self, seconds: float) -> None:
        self._computes = max(self.clock(), self._computes) + seconds

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
            self._inward = max(self.clock(), self._inward) + self.speed.copy
            self._computes = max(self._computes, self._inward)
        return parts

    def wait(self) -> None:
        self.hold(self._computes)

    def hold(self, until: float) -> None:
        if until > self.clock():
            self.held, self.waits = max(self.held, until), self.waits + 1


class QueuedStage(Stage):
    """Computes at once, and takes its time on the device."""

    def __init__(self, values: StageValues, device: QueuedDevice) -> None:
        super().__init__(values, copies=device)
        self._queues = device

    @property
    def runs_ahead(self) -> bool:
        return True

    def wait(self) -> None:
        self._queues.wait()

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        outputs = super().forward(work, step, microbatch, inputs)
        self._queues.run(self._queues.speed.forward)
        return outputs

    def advance(self, forwarding: Forwarding) -> None:
        super().advance(forwarding)
        self._queues.run(self._queues.speed.forward / len(self.values.layers))

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Parts | None, *, postpone: bool = False
    ) -> Parts:
        inputs = super().backward(work, step, microbatch, gradients, postpone=postpone)
        self._queues.run(self._queues.speed.backward * (1.0 if work.parts is None else self._part))
        return inputs

    def backward_rest(self, work: Work, step: int, microbatch: int) -> None:
        left = work.parts is not None
        super().backward_rest(work, step, microbatch)
        if left:
            self._queues.run(self._queues.speed.backward * self._part)

    @property
    def _part(self) -> float:
        """All take as long."""
        return 1 / len({bucket.layer for bucket in self.values.parameters.buckets})


class QueuedJob(Job):
    """A job whose workers have such devices. at: when each instruction was started, and when the host was done
    with it.
    """

    def __init__(self, manifest: dict[str, Any], speed: Speed) -> None:
        self.speed, self.devices, self.at = speed, list[QueuedDevice](), dict[Fault, float]()
        self.waits: dict[int, int] = {}  # by step, of all hosts until its optimizer step on the first stage
        super().__init__(manifest, copies=self._new_device)

    def _new_device(self) -> QueuedDevice:
        self.devices.append(QueuedDevice(lambda: self.now, self.speed))
        return self.devices[-1]

    def device_of(self, worker: str) -> QueuedDevice:
        """Workers and devices are numbered in the order in which they come."""
        return self.devices[int(worker.removeprefix("w"))]

    def stage(self, worker: str, stage: int, stages: Sequence[tuple[int, int]], config: TrainingConfig) -> Stage:
        device = self.device_of(worker)
        return QueuedStage(StageValues(self.task, stage, stages, config, copies=device), device)

    def strikes(self, fault: Fault) -> bool:
        self.at[fault] = self.now
        if fault.name == "OptimizerStep" and fault.after and fault.cell == (0, 0):
            self.waits[fault.step] = sum(device.waits for device in self.devices)
        return super().strikes(fault)

    def step_seconds(self, step: int) -> float:
        """The seconds between the first stage's optimizer steps."""
        ends = [self.at[Fault("OptimizerStep", (0, 0), k, after=True)] for k in (step - 1, step)]
        return ends[1] - ends[0]

    def _turn(self, node: Node) -> None:
        if self.device_of(node.name).held <= self.now:
            super()._turn(node)
