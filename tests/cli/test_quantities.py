"""Kubernetes' quantities."""

from decimal import Decimal

import pytest

from bamboo.remote.diagnosis.quantities import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (3, 3), ("500m", Decimal("0.5")), ("2Ki", 2048), ("16Gi", 16 << 30), ("5G", 5 * 10**9), ("1e3", 1000)],
)
def test_quantities_are_numbers(text: str | int, value: Decimal) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "many", "1 Gi", "-1"])
def test_other_text_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a Kubernetes quantity"):
        quantity(text)
