"""What a new operator finds counted in a job's status."""

from decimal import Decimal

from bamboo_core.job.status import BambooJobStatus, JobCost
from bamboo_operator.status.facts import EarlierCounts, StatusFacts
from operator_kit import NOW, job


def test_counts_go_on_from_the_status_that_is_found() -> None:
    cost = JobCost(total="1.20", repeated="0.05")
    found = EarlierCounts.of(BambooJobStatus(preemptions=3, restarts=2, repeated_steps=7, cost=cost))
    assert (found.preemptions, found.takeovers, found.restores, found.restarts) == (3, 0, 0, 2)
    assert (found.repeated_steps, found.cost, found.repeated_cost) == (7, Decimal("1.20"), Decimal("0.05"))
    assert EarlierCounts.of(BambooJobStatus()) == EarlierCounts()


def test_a_job_without_a_valid_spec_is_not_suspended() -> None:
    assert not StatusFacts(now=NOW, generation=1, spec=None).suspended
    assert StatusFacts(now=NOW, generation=1, spec=job(suspend=True)).suspended
    assert StatusFacts(now=NOW, generation=1, spec=None).time == NOW
