"""A task's config as values of fields: known keys, and values of their types."""

import re
from typing import Any

import pytest

from bamboo_trainer.models.settings import typed_values

KEYS: dict[str, tuple[str, Any]] = {
    "learningRate": ("learning_rate", float),
    "blocks": ("blocks", (str, list)),
    "steps": ("steps", int),
    "tied": ("tied", bool),
}


def test_values_have_the_names_of_fields_and_whole_numbers_are_floats_where_floats_are_expected() -> None:
    values = typed_values({"learningRate": 1, "blocks": ["a"], "steps": 2, "tied": False}, KEYS)
    assert values == {"learning_rate": 1.0, "blocks": ["a"], "steps": 2, "tied": False}
    assert type(values["learning_rate"]) is float


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"x": 1}, "unknown key 'x', expected some of learningRate, blocks, steps, tied"),
        ({"learnigRate": 1}, "unknown key 'learnigRate', did you mean learningRate?"),
        ({"steps": 1.0}, "steps must be of type int, got 1.0"),
        ({"steps": True}, "steps must be of type int, got True"),
        ({"learningRate": False}, "learningRate must be of type float, got False"),
        ({"tied": 1}, "tied must be of type bool, got 1"),
        ({"blocks": 3}, "blocks must be of type str or list, got 3"),
        ({"steps": None}, "steps must be of type int, got None"),
    ],
)
def test_a_wrong_key_or_value_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        typed_values(config, KEYS)


def test_null_is_taken_where_it_is_allowed() -> None:
    assert typed_values({"steps": None}, KEYS, nullable=("steps",)) == {"steps": None}
