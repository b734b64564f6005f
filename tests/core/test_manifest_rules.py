"""Validation rules that involve several fields of a manifest."""

from decimal import Decimal
from typing import Any

import pytest

from bamboo_core.job.manifest import parse_manifest
from manifest_kit import changed, problems

POOLS = [{"name": "spot", "pricePerHour": "1"}]


@pytest.mark.parametrize(
    ("wrong", "value", "others"),
    [
        ("spec.training.microBatchSize", "x", {}),
        *(("spec.topology.stages", stages, {"spec.elastic": {"maxWorkers": 8}}) for stages in ("auto", 0, True, 2.5)),
        ("spec.topology.stages", "4", {"spec.elastic": {"maxWorkers": 8, "minStages": 2, "minWorkers": 4}}),
        *((f"spec.budget.{kind}", 5, {"spec.nodePools": POOLS}) for kind in ("money", "doneBy")),
    ],
)
def test_a_rule_is_silent_where_its_field_is_wrong(wrong: str, value: object, others: dict[str, Any]) -> None:
    document = changed(others | {wrong: value})
    assert [problem.split(":")[0] for problem in problems(document)] == [wrong]


def test_money_is_as_exact_as_the_cost_that_is_kept() -> None:
    document = changed({"spec.nodePools": [{"name": "spot", "pricePerHour": "0.123456"}]})
    kept = parse_manifest(document | {"spec": document["spec"] | {"budget": {"money": "10.0001"}}})
    assert kept.budget is not None
    assert kept.budget.money == Decimal("10.0001")
    finer = document | {"spec": document["spec"] | {"budget": {"money": "10.00003"}}}
    expected = 'a decimal number in quotes with at most 4 decimals such as "99.95"'
    assert problems(finer) == [f'spec.budget.money: expected {expected}, got "10.00003"']
