"""What a new operator finds counted in a job's status."""

from decimal import Decimal

from bamboo_operator.status.facts import EarlierCounts, StatusFacts
from operator_kit import NOW, job


def test_counts_go_on_from_the_status_that_is_found() -> None:
    found = EarlierCounts.of(
        {
            "preemptions": 3,
            "takeovers": None,
            "restarts": 2,
            "repeatedSteps": 7,
            "cost": {"total": "1.20", "repeated": "0.05"},
        }
    )
    assert (found.preemptions, found.takeovers, found.restores, found.restarts) == (3, 0, 0, 2)
    assert (found.repeated_steps, found.cost, found.repeated_cost) == (7, Decimal("1.20"), Decimal("0.05"))
    assert EarlierCounts.of({}) == EarlierCounts()


def test_a_job_without_a_valid_spec_is_not_suspended() -> None:
    assert not StatusFacts(now=NOW, generation=1, spec=None).suspended
    assert StatusFacts(now=NOW, generation=1, spec=job(suspend=True)).suspended
    assert StatusFacts(now=NOW, generation=1, spec=None).time == "2026-03-01T12:00:00Z"
