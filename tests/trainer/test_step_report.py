"""What a step came to, over all microbatches."""

from typing import Any

from bamboo_core.planning.plan import Cell
from bamboo_trainer.commit.step_report import combined
from bamboo_trainer.frames.payloads import Ready


def ready(pipeline: int, **facts: Any) -> Ready:
    return Ready(cell=Cell(pipeline, 0), squared_norm=[4.0], **({"losses": {}} | facts))


def test_losses_are_summed_exactly_whatever_their_order() -> None:
    one = ready(0, losses={0: 1e16, 1: 1.0}, weights={0: 1.0, 1: 2.0}, added={"a": [0.5]})
    other = ready(1, losses={2: -1e16}, weights={2: 1.0}, added={"a": [1e16, 2.5], "b": [-1e16]})
    result = combined([one, other])
    assert (result.loss, result.scale, result.norm, result.microbatches) == (1.0, 0.25, 0.5, 3)
    assert result.metrics == {"a": (1e16 + 3) / 4, "b": -1e16 / 4}
    assert combined([other, one]) == result


def test_what_is_no_number_is_told_as_none() -> None:
    assert combined([ready(0, losses={0: 1.0}, weights={0: 0.0})]).loss != 0
    for facts in ({"weights": {0: 0.0}}, {"weights": {0: 1e-320}}, {"added": {"a": [float("inf")]}}):
        loss = combined([ready(0, losses={0: 1.0}, **facts)]).loss
        assert not abs(loss) <= 1e300
    mixed = combined([ready(0, losses={0: 1.0}, weights={0: 1.0}), ready(1, losses={1: 1.0})])
    both = combined([ready(0, losses={0: float("inf"), 1: -float("inf")})])
    assert (mixed.loss != mixed.loss, both.loss != both.loss) == (True, True)
    assert combined([ready(0, losses={0: 1.0, 1: 2.0})]).loss == 1.5
