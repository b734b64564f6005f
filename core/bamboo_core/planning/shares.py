"""How the layers of a stage are dealt to those who write them."""

from collections.abc import Sequence

from bamboo_core.planning.plan import Plan, WorkerId


def share(writers: Sequence[WorkerId], worker: WorkerId, layers: tuple[int, int]) -> list[int]:
    """The layers of a stage that one of its writers writes: they are dealt in turn. layers: half-open range."""
    first, end = layers
    return [layer for layer in range(first, end) if writers and writers[(layer - first) % len(writers)] == worker]


def kept_share(plan: Plan, worker: WorkerId) -> set[int]:
    """The layers that a worker keeps copies of in host memory when all have begun: each has one who does."""
    kept: set[int] = set()
    for number, layers in enumerate(plan.stages):
        holders = dict.fromkeys(w for c in plan.cells() if c.stage == number for w in plan.at(c).holders)
        kept.update(share(tuple(holders), worker, layers))
    return kept
