"""One worker's real engine. The test plays its peers and its coordinator."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.planning.plan import Cell, Plan
from bamboo_trainer.engine.components import Components
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.frames import Address, Frame, FrameKind
from bamboo_trainer.stage.layer_state import LayerState
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.training import TrainingConfig
from bamboo_trainer.transport.base import Arrived
from recording_transport import RecordingTransport, Told
from replica_kit import TRAINING, planned
from stage_kit import StagesOfTask, small_task

# A plan of three stages, each of one layer; w0 runs the first and is the shadow of the second, and so on.
THREE = planned(3, 1, 1, "a")
CONFIG = TrainingConfig(
    seed=3, precision="fp32", max_gradient_norm=None, microbatches=TRAINING.global_batch_size, micro_batch_size=1
)
STEPS = 9


class NoFiles:
    """A `CheckpointFiles` for jobs without checkpoints: each use fails the test."""

    def keep(self, checkpoint: CheckpointId, states: Mapping[int, LayerState], seconds: float) -> None:
        raise AssertionError("nothing is kept")

    def restore(self, values: StageValues, checkpoint: CheckpointId, here: Mapping[int, LayerState]) -> NoReturn:
        raise AssertionError("nothing is kept")


class OneEngine:
    """One worker's engine. now: its clock, in seconds. said: messages to the coordinator. did: (name, cell, microbatch)
    of finished instructions since the last work() began. net: sent frames.
    """

    def __init__(self, worker: str, plan: Plan | None = THREE, devices: int = 1) -> None:
        self.now, self.said, self.net = 0.0, Told(), RecordingTransport()
        self.did: list[tuple[str, Cell, int]] = []
        self.worker = worker
        self.engine = Engine(
            Ports(
                worker=worker,
                steps=STEPS,
                builder=StagesOfTask(small_task(), CONFIG),
                files=NoFiles(),
                new_id=lambda: "a",
                transport=self.net,
                coordinator=self.said,
                observer=self,
                clock=lambda: self.now,
                work_clock=lambda: self.now,
                devices=devices,
            )
        )
        if plan is not None:
            self.engine.obey(plan)
        self.net.take()

    @property
    def inside(self) -> Components:
        assert self.engine.components is not None
        return self.engine.components

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        """Ignore the start of an instruction; see `Observer`."""

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.did.append((name, cell, microbatch))

    def event(self, name: str, **facts: object) -> None:
        """Ignore an event; see `Observer`."""

    def work(self) -> list[tuple[str, int]]:
        """Run all instructions that are ready, and return their names and microbatches in order."""
        self.did.clear()
        while self.engine.turn():
            pass
        return [(name, microbatch) for name, _, microbatch in self.did]

    def get(self, kind: FrameKind, cell: Cell, *tensors: torch.Tensor, sender: str = "", **more: Any) -> None:
        """Deliver a frame to the engine. sender: "" for another worker. more: fields of the frame and its address."""
        fields = {name: more.pop(name) for name in ("step", "microbatch", "part") if name in more}
        address = Address(kind, *cell, fields.pop("step", 0), **fields)
        plan = self.inside.plan.current
        frame = Frame(address=address, origin=plan.origin, tensors=tensors, **({"epoch": plan.epoch} | more))
        self.engine.handle(Arrived(sender or _somebody_else(plan, self.worker), frame))

    def sent(self) -> list[tuple[str, FrameKind, int]]:
        """Return receivers, kinds and microbatches of the frames sent since the last call."""
        return [(peer, frame.address.kind, frame.address.microbatch) for peer, frame in self.net.take()]


def _somebody_else(plan: Plan, worker: str) -> str:
    return min(plan.worker_ids() - {worker}, default=worker)
