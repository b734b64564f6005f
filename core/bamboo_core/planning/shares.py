"""Division of a stage's layers among the workers that copy or write them."""

from collections.abc import Sequence

from bamboo_core.planning.plan import Plan, WorkerId


def share(writers: Sequence[WorkerId], worker: WorkerId, layers: tuple[int, int]) -> list[int]:
    """Return the layers of a stage (a half-open range) that a worker copies or writes: `writers` get them in turn."""
    first, end = layers
    return [layer for layer in range(first, end) if writers and writers[(layer - first) % len(writers)] == worker]


def kept_share(plan: Plan, worker: WorkerId) -> set[int]:
    """Return the layers whose copies a worker keeps after starting from a checkpoint; a stage's holders divide them."""
    kept: set[int] = set()
    for number, layers in enumerate(plan.stages):
        holders = dict.fromkeys(w for c in plan.cells() if c.stage == number for w in plan.at(c).holders)
        kept.update(share(tuple(holders), worker, layers))
    return kept
