"""Simulated workers of given speeds around the real coordinator, for tests of its decisions on slow workers."""

from collections.abc import Mapping
from typing import Any

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.splits.speeds import StageTimes
from world import World, held

FORWARD, BACKWARD = 0.02, 0.04  # seconds of a layer


class Slowed(World):
    """Simulated workers that report times and headroom. slowness, work: factors of the times by worker and by layer; 1
    by default. shadows: owners and replicas report times of each layer; else only owners report, and only for whole
    stages. Unless `chooses` is given, the job allows only this grid, and the coordinator waits for no more workers.
    """

    def __init__(self, stages: int, pipelines: int, standby: int, *, shadows: bool = True, **options: Any) -> None:
        if "chooses" not in options:
            bounds = {"minWorkers": stages * pipelines}
            options = {"schedule": "1F1B", "chooses": ("pipelines",), "elastic": bounds, **options}
        self.slowness: dict[str, float] = {}
        self.work: dict[int, float] = {}
        self.headroom: dict[str, float] = {}
        self.shadows = shadows
        super().__init__(stages, pipelines, standby, **options)

    def train(self, steps: int, seconds: float | None = None) -> None:
        """Commit up to `steps` steps. Workers report and obey at once. seconds: of a step; None: `step_seconds()`."""
        for _ in range(steps):
            self.settle_now()
            if self.finish:
                return
            taken = self.step_seconds() if seconds is None else seconds
            self.now += max(1.0, taken)
            for worker, times in self.times().items():
                beat = protocol.Heartbeat(step=self.state.step, times=times, headroom=self.headroom.get(worker))
                self.tell(Received(worker, beat))
            plan, resplit = self.state.plan, self.state.splits.resplit
            assert plan is not None
            if resplit and resplit.cut:
                continue  # the step begins anew
            mark = resplit and resplit.cut is None and self.state.step + 1 >= resplit.at
            cut = CheckpointId(step=self.state.step + 1, id=f"cut{plan.epoch}")
            message = protocol.StepCommitted(
                step=self.state.step,
                generation=plan.target.generation,
                loss=1.0,
                gradient_norm=1.0,
                microbatches=8,
                seconds=taken,
                checkpoint=(resplit.number, cut) if resplit and mark else None,
            )
            self.tell(Received(plan.at(Cell(0, 0)).owner, message))
            if mark:
                self.hold(cut)

    def settle_now(self) -> None:
        while self.pending:
            self.deliver()

    def hold(self, cut: CheckpointId) -> None:
        for worker in sorted(self.plan.holders()):
            self.tell(Received(worker, held(self.plan, worker, cut)))

    def taken(self, worker: str, layers: tuple[int, int]) -> float:
        return self.slowness.get(worker, 1.0) * sum(self.work.get(layer, 1.0) for layer in range(*layers))

    def times(self) -> Mapping[str, tuple[StageTimes, ...]]:
        plan = self.plan
        found: dict[str, tuple[StageTimes, ...]] = {}
        for cell in plan.cells():
            layers, (owner, *replicas) = plan.stages[cell.stage], plan.at(cell).holders
            for worker in [owner, *replicas] if self.shadows else [owner]:
                owns, whole = worker == owner, self.taken(worker, layers)
                each = tuple(FORWARD * self.taken(worker, (i, i + 1)) for i in range(*layers))
                one = StageTimes(
                    layers=layers,
                    each=each if self.shadows else (),
                    forward=FORWARD * whole * owns,
                    backward=BACKWARD * whole * owns,
                    microbatches=32 * owns,
                )
                found[worker] = (*found.get(worker, ()), one)
        return found

    def step_seconds(self) -> float:
        """Return the seconds of a step, which the slowest cell (stage of a pipeline) determines."""
        plan = self.plan
        longest = max(self.taken(plan.at(c).owner, plan.stages[c.stage]) for c in plan.cells())
        return (FORWARD + BACKWARD) * longest * 8 / len(plan.pipelines)

    def reasons(self) -> list[str]:
        mine = (
            "StragglerFound",
            "StragglerRecovered",
            "StragglerReplaced",
            "Rebalancing",
            "StragglerReplacementRequested",
            "StragglerKept",
        )
        return [e.reason for e in self.told if e.reason in mine]

    def said(self, reason: str) -> list[str]:
        return [e.message for e in self.told if e.reason == reason]

    def owner(self, stage: int, pipeline: int = 0) -> str:
        return self.plan.at(Cell(pipeline, stage)).owner

    def layers(self, worker: str) -> list[int]:
        """Return the number of layers in each stage that the worker runs."""
        plan = self.plan
        return [end - first for c in plan.owned_by(worker) for first, end in [plan.stages[c.stage]]]


def trained(stages: int, pipelines: int, standby: int, **options: Any) -> Slowed:
    world = Slowed(stages, pipelines, standby, **options)
    world.settle()
    world.train(10)
    assert world.reasons() == []
    return world
