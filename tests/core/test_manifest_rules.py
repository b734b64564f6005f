"""Rules between fields of a manifest."""

from decimal import Decimal

import pytest

from bamboo_core.job.manifest import parse_manifest
from manifest_kit import changed, problems


def test_a_rule_is_silent_where_its_field_is_wrong() -> None:
    assert problems(changed({"spec.training.microBatchSize": "x"})) == [
        'spec.training.microBatchSize: expected an integer >= 1, got "x"'
    ]


@pytest.mark.parametrize("stages", ["auto", 0, "4", True, 2.5])
@pytest.mark.parametrize(
    "elastic",
    [
        {"maxWorkers": 8},
        {"maxWorkers": 8, "minStages": 2, "minWorkers": 4},
        {"maxWorkers": 8, "objective": "Value"},
    ],
)
def test_a_wrong_number_of_stages_makes_nothing_else_wrong(stages: object, elastic: dict[str, object]) -> None:
    document = changed({"spec.topology": {"stages": stages}, "spec.elastic": elastic})
    assert [problem.split(":")[0] for problem in problems(document)] == ["spec.topology.stages"]


@pytest.mark.parametrize("amount", [0, "", 5, "free"])
@pytest.mark.parametrize("kind", ["money", "doneBy"])
def test_a_wrong_budget_is_not_one_that_is_missing(kind: str, amount: object) -> None:
    pools = [{"name": "spot", "pricePerHour": "1"}]
    document = changed({"spec.nodePools": pools, "spec.budget": {kind: amount}})
    assert [problem.split(":")[0] for problem in problems(document)] == [f"spec.budget.{kind}"]


def test_money_is_as_exact_as_the_cost_that_is_kept() -> None:
    document = changed({"spec.nodePools": [{"name": "spot", "pricePerHour": "0.123456"}]})
    kept = parse_manifest(document | {"spec": document["spec"] | {"budget": {"money": "10.0001"}}})
    assert kept.budget is not None
    assert kept.budget.money == Decimal("10.0001")
    finer = document | {"spec": document["spec"] | {"budget": {"money": "10.00003"}}}
    expected = 'a decimal number in quotes with at most 4 decimals such as "99.95"'
    assert problems(finer) == [f'spec.budget.money: expected {expected}, got "10.00003"']
