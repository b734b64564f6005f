"""Tasks whose losses are sums."""

from collections.abc import Callable
from typing import Any

from torch import nn

from bamboo_core.planning.plan import Cell
from bamboo_trainer.commit.step_report import combined, step_report
from bamboo_trainer.training import TrainingConfig
from stage_kit import begin, microbatch, reduce_tied


def one_step(stages: Any, step: int, config: TrainingConfig) -> Any:
    works = [begin(stage, *range(config.microbatches)) for stage in stages]
    for index in range(config.microbatches):
        microbatch(stages, works, step, index)
    finals = reduce_tied(stages, [work.gradients.total() for work in works])
    for work in works:
        work.read(work.figures())
    reports = [
        step_report(Cell(0, s), stage.values.final.squared_norms(final).tolist(), work)
        for s, (stage, final, work) in enumerate(zip(stages, finals, works, strict=True))
    ]
    result = combined(reports)
    for stage, final in zip(stages, finals, strict=True):
        stage.values.apply(final, result.norm, scale=result.scale)
    return result


def added(layer: Callable[[], nn.Module]) -> dict[str, Any]:
    return {"layers": (lambda: nn.Linear(2, 2), layer)}
