"""Conversion between JSON of the Kubernetes API and Python types (`ApiPart`); unknown fields are ignored."""

from datetime import UTC, datetime

import msgspec
import pytest

from bamboo_core.job.api_object import ApiPart, Time, read_api_part, written

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Inner(ApiPart, frozen=True):
    so_far: int | None = None
    at: Time | None = None


class Outer(ApiPart, frozen=True):
    count: int = 0
    name: str | None = None
    names: tuple[str, ...] | None = None
    numbers: dict[str, float | None] = msgspec.field(default_factory=dict)
    one: Inner = Inner()
    other: Inner | None = None


FULL = {
    "count": 2,
    "name": "a",
    "names": ["b", "c"],
    "numbers": {"x": 0.5},
    "one": {"soFar": 1},
    "other": {"soFar": 3, "at": "2026-03-01T12:00:00Z"},
}


def test_an_object_is_written_as_it_was_read() -> None:
    found = read_api_part(Outer, FULL)
    assert found.other == Inner(so_far=3, at=NOON)
    assert written(found) == FULL


def test_what_is_none_and_a_part_that_says_nothing_are_left_out() -> None:
    assert written(Outer()) == {"count": 0, "numbers": {}}


@pytest.mark.parametrize(
    ("document", "read"),
    [
        (None, Outer()),
        ({"name": "a", "later": 1, "count": None, "one": None, "other": None}, Outer(name="a")),
        ({"name": "a", "count": "many"}, Outer()),
    ],
)
def test_unknown_and_null_fields_count_as_absent(document: object, read: Outer) -> None:
    assert read_api_part(Outer, document) == read
