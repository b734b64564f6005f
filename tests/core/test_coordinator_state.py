"""The coordinator's state: each of its fields is a `Record`, and no two are of the same class."""

from dataclasses import fields

from bamboo_core.coordinator.replacing import Record
from world import World


def test_each_record_has_a_place_of_its_own() -> None:
    state = World(2, 1, 0).state
    kinds = [type(getattr(state, one.name)) for one in fields(state)]
    assert len(set(kinds)) == len(kinds)
    assert all(issubclass(kind, Record) for kind in kinds)
