"""A record is replaced as a dataclass is."""

import dataclasses

import pytest

from bamboo_core.coordinator.progress import Progress
from bamboo_core.coordinator.replacing import replace


def test_a_record_is_replaced_as_a_dataclass_is() -> None:
    before = Progress(step=3, losses={2: 1.0})
    assert replace(before, step=4, trained=1) == dataclasses.replace(before, step=4, trained=1)
    assert (before.step, replace(before).losses is before.losses) == (3, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(before, step=4).step = 5  # type: ignore[misc]


def test_a_field_that_a_record_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match="Progress has no stepp"):
        replace(Progress(), stepp=7)  # type: ignore[call-arg]
