"""What a task's decisions said last, among the numbers of every layer's state."""

from typing import Any

import pytest

from bamboo_trainer.frames.payloads import Decided
from bamboo_trainer.stage.state.decided import numbers, of_numbers

SAID = Decided(learning_rate=0.5, frozen=("0.*",), stops=("end",), memory={"end": {"a.b": 1.5, "n": None, "on": True}})


def test_what_is_kept_is_found_again_in_any_layers() -> None:
    kept = numbers(SAID, {"0.weight": {0}, "1.bias": {1, 3}}, range(5))
    for layers, frozen in (([0, 3], ("0.weight", "1.bias")), ([3], ("1.bias",)), ([4], ())):
        assert of_numbers(kept, layers) == Decided(
            learning_rate=0.5, frozen=frozen, stops=SAID.stops, memory=SAID.memory
        )


def test_a_state_without_any_has_been_told_nothing() -> None:
    assert of_numbers({"state:0.weight:step": 1}, [0, 1]) is None
    assert of_numbers({}, []) is None


@pytest.mark.parametrize("value", [None, -0.5, 1, float("nan")])
def test_a_factor_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="the learning rate's factor must be a finite number"):
        of_numbers(numbers(SAID, {}, [0]) | {"decided:0.learning_rate": value}, [0])


def test_layers_of_different_decisions_are_refused() -> None:
    kept = numbers(SAID, {}, [0]) | numbers(Decided(), {}, [1])
    with pytest.raises(ValueError, match="the layers' states have different decisions"):
        of_numbers(kept, [0, 1])
