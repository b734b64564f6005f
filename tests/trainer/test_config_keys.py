"""The keys of a config: known and required ones, and their values' types."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from bamboo_trainer.data.config_keys import arguments


def take(
    made: object = None,
    *,
    learning_rate: float,
    blocks: str | Sequence[str] = (),
    steps: int | None = None,
    tied: bool = False,
    kind: Literal["a", "b"] = "a",
    config: Mapping[str, Any] | None = None,
    where: str = "",
) -> None:
    raise AssertionError("only its parameters are read")


def test_values_have_the_names_of_parameters_and_whole_numbers_are_floats_where_floats_are_expected() -> None:
    given = {"blocks": ["a"], "steps": None, "tied": True, "config": {}}
    values = arguments(take, {"learningRate": 1, **given}, "where")
    assert values == {**given, "learning_rate": 1.0}
    assert type(values["learning_rate"]) is float


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"x": 1}, "unknown key 'x', expected some of learningRate, blocks, steps, tied, kind, config"),
        ({"learnigRate": 1}, "unknown key 'learnigRate', did you mean learningRate?"),
        ({"where": "x"}, "unknown key 'where', expected some of"),
        ({"made": 1}, "unknown key 'made', expected some of"),
        ({}, "learningRate is missing"),
        ({"steps": 1.0}, "steps must be a whole number or null, got 1.0"),
        ({"steps": True}, "steps must be a whole number or null, got True"),
        ({"learningRate": False}, "learningRate must be a finite number, got False"),
        ({"learningRate": None}, "learningRate must be a finite number, got None"),
        ({"learningRate": float("nan")}, "learningRate must be a finite number, got nan"),
        ({"learningRate": 10**400}, "learningRate must be a finite number, got 10"),
        ({"tied": 1}, "tied must be true or false, got 1"),
        ({"blocks": 3}, "blocks must be a text or a list of texts, got 3"),
        ({"blocks": ["a", 1]}, "blocks must be a text or a list of texts, got ['a', 1]"),
        ({"kind": "c"}, "kind must be one of a, b, got 'c'"),
        ({"config": []}, "config must be a mapping or null, got []"),
    ],
)
def test_a_wrong_key_or_value_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        arguments(take, {"learningRate": 1, **config} if config else {}, "where")
