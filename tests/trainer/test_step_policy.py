"""What becomes of a step whose loss or gradients are not finite."""

import math

import pytest

from bamboo_trainer.commit.step_policy import APPLIES_ALL, StepPolicy

NO, YES = 1.0, math.nan


@pytest.mark.parametrize(
    ("skips", "scales", "loss", "norm", "left_out"),
    [
        (False, False, YES, YES, False),
        (True, False, NO, NO, False),
        (True, False, YES, NO, True),
        (True, False, NO, math.inf, True),
        (False, True, NO, math.inf, True),  # the scale was too large
        (False, True, YES, YES, False),  # the forward overflows in itself
        (True, True, YES, YES, True),
    ],
)
def test_a_step_is_left_out_if_the_policy_says_so(
    skips: bool, scales: bool, loss: float, norm: float, left_out: bool
) -> None:
    assert StepPolicy(skips=skips, scales=scales).leaves_out(loss, norm) is left_out


def test_without_a_policy_every_step_is_applied() -> None:
    assert not APPLIES_ALL.leaves_out(math.nan, math.nan)
