"""A task trained undisturbed, and with losses of workers, on other grids, from a checkpoint: always the same bits."""

from typing import Any

from bamboo_core.control.digests import add_digests
from bamboo_core.planning.plan import Cell
from manifest_kit import bamboojob, training
from training_job import Fault, Job, MemoryStore

STEPS = 4


def disturbed_alike(task: dict[str, Any], **more: Any) -> Job:
    """The undisturbed job. task: entrypoint and config, with four layers at least. more: of the training."""

    def job(
        grid: tuple[int, int], *faults: Fault, steps: int = STEPS, every: int = 0, store: MemoryStore | None = None
    ) -> Job:
        kept = {"checkpoint": {"storage": {"uri": "memory://x"}, "everySteps": every}} if every else {}
        document = bamboojob(
            task=task,
            training=training(steps, 8, 2, maxGradientNorm=1.0, **more),
            topology={"stages": grid[0], "pipelines": grid[1]},
            **kept,
        )
        return Job(document, faults, store=store).run()

    alone, store = job((1, 1)), MemoryStore()
    job((2, 1), steps=2, every=2, store=store)
    assert [one.step for one in store.committed] == [2]
    others = [
        job((4, 1), Fault("Backward", Cell(0, 1), 1, 1), Fault("Forward", Cell(0, 3), 2, 2)),
        job((2, 2), Fault("Forward", Cell(1, 1), 1, 3), Fault("Backward", Cell(0, 0), 3, 0)),
        job((3, 1), Fault("Forward", Cell(0, 0), 2, 1), every=100, store=store),
    ]
    for other, first in zip(others, (0, 0, 2), strict=True):
        assert other.state.moves.takeovers
        losses = {step: loss for step, loss in alone.state.progress.losses.items() if step >= first}
        assert {step: other.state.progress.losses[step] for step in losses} == losses
        assert add_digests(other.digests) == add_digests(alone.digests)
    return alone
