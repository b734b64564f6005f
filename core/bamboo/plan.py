"""The plan: who holds what, and how a step's microbatches are split. A frozen value, made only by the coordinator.

Two things are kept apart on purpose. The *assignment* (who owns and who replicates each cell) changes with the epoch
and may change in the middle of a step. The *layout* (how many pipelines, which microbatches each runs) has a
generation of its own and is switched only by the commit of a step, so that no step ever changes its split midway.
"""

from typing import NamedTuple

import msgspec

from bamboo.spec import RedundancyMode

WorkerId = str


class Cell(NamedTuple):
    """One stage of one pipeline."""

    pipeline: int
    stage: int


ROOT = Cell(0, 0)  # its owner decides when a step is committed


class Assignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who runs a cell, and who keeps a replica of its state; the first replica is the shadow."""

    owner: WorkerId
    replicas: tuple[WorkerId, ...] = ()

    @property
    def shadow(self) -> WorkerId | None:
        return self.replicas[0] if self.replicas else None

    @property
    def holders(self) -> tuple[WorkerId, ...]:
        return (self.owner, *self.replicas)


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The global microbatch indices that each pipeline runs in a step."""

    generation: int
    split: tuple[tuple[int, ...], ...]

    @property
    def pipelines(self) -> int:
        return len(self.split)


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A live worker and where its data plane listens."""

    worker: WorkerId
    host: str
    port: int
    zone: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One epoch's truth. `boundary`: takes effect at the step boundary that the root picks; else at once."""

    epoch: int
    stages: tuple[tuple[int, int], ...]  # the half-open layer range of each stage
    pipelines: tuple[tuple[Assignment, ...], ...]  # [pipeline][stage]
    layouts: tuple[Layout, ...]  # those that may be in force, oldest first; the last one is the target
    workers: tuple[Peer, ...]
    mode: RedundancyMode = RedundancyMode.LAZY_FORWARD
    boundary: bool = False
    reason: str = ""
    message: str = ""

    def at(self, cell: Cell) -> Assignment:
        return self.pipelines[cell.pipeline][cell.stage]

    def cells(self) -> list[Cell]:
        return [Cell(d, s) for d in range(len(self.pipelines)) for s in range(len(self.stages))]

    def owned_by(self, worker: WorkerId) -> list[Cell]:
        return [c for c in self.cells() if self.at(c).owner == worker]

    def replicated_by(self, worker: WorkerId) -> list[Cell]:
        return [c for c in self.cells() if worker in self.at(c).replicas]

    def worker_ids(self) -> frozenset[WorkerId]:
        return frozenset(p.worker for p in self.workers)

    @property
    def target(self) -> Layout:
        return self.layouts[-1]


def plan_problems(plan: Plan) -> list[str]:
    """What breaks the plan's invariants; empty if it is sound."""
    problems = []
    known = plan.worker_ids()
    if len(known) != len(plan.workers):
        problems.append("a worker is listed twice")
    for cell in plan.cells():
        holders = plan.at(cell).holders
        if len(set(holders)) != len(holders):
            problems.append(f"{cell} is held twice by one worker")
        problems += [f"{cell} names {w}, which is not a live worker" for w in holders if w not in known]
    if any(len(row) != len(plan.stages) for row in plan.pipelines):
        problems.append("a pipeline lacks a stage")
    if plan.target.pipelines > len(plan.pipelines):
        problems.append("the target layout has more pipelines than are assigned")
    expected = 0
    for first, last in plan.stages:
        if first != expected or last <= first:
            problems.append("stages are not a partition of the layers")
        expected = last
    microbatches = [sorted(m for part in layout.split for m in part) for layout in plan.layouts]
    if any(m != list(range(len(microbatches[0]))) for m in microbatches):
        problems.append("a layout does not run every microbatch exactly once")
    return problems
