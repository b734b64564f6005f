"""Whose results are wrong, by all that was said of them."""

import pytest

from bamboo_core.coordinator.verification.evidence import Sums, none_is_steady, wrong_workers

X, Y, Z = "x", "y", "z"


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"a": (X,), "b": (Y,)}, None),
        ({"a": (X,), "b": (Y, Y)}, None),
        ({"a": (X,), "b": (Y, Z)}, {"b"}),
        ({"a": (X, Y), "b": (Y, Y)}, {"a"}),
        ({"a": (X, Z), "b": (Y,)}, {"a"}),
        ({"a": (X, X), "b": (Y, X)}, {"b"}),
        ({"a": (X, X), "b": (Y, Y)}, None),
        ({"a": (X, X), "b": (Y, Y), "c": (Y,)}, {"a"}),
        ({"a": (X, X), "b": (Y, Y), "c": (X,)}, {"b"}),
        ({"a": (X,), "b": (Y,), "c": (Z,)}, None),
        ({"a": (X,), "b": (X,), "c": (Y,), "d": (Y,)}, None),
        ({"a": (X,), "b": (X,), "c": (Y, Z), "d": (Y,)}, {"c", "d"}),
        ({"a": (X, Y), "b": (Y, Z)}, None),
        ({"a": (X,), "b": (X,)}, set()),
        ({}, None),
    ],
)
def test_who_is_wrong(said: Sums, wrong: set[str] | None) -> None:
    assert wrong_workers(said) == wrong


def test_what_nobody_comes_to_again_is_nobodys_fault() -> None:
    assert none_is_steady({"a": (X, Y), "b": (Y, Z)})
    assert not none_is_steady({"a": (X, Y), "b": (Y,)})
    assert not none_is_steady({"a": (X, Y)})
