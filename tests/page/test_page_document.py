"""The document that the operator makes for a page."""

from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.coordinator.events import Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import read_status
from bamboo_core.page import document as d
from bamboo_core.page.builder import NOT_SEEN, OWNERS_ONLY, RESTARTED
from bamboo_core.page.history import JobHistory
from bamboo_operator.http.page_document import NO_PRICE
from bamboo_operator.http.page_document import page_document as looked
from bamboo_operator.status.facts import StatusFacts
from bamboo_operator.status.operated_job import OperatedJob
from operator_kit import NOW, at, checkpoints, job, said, viewed
from page_kit import Time, written

WHEN = NOW.timestamp()


POOLS = [
    {"name": "spot", "capacity": "Spot", "pricePerHour": "1.00"},
    {"name": "fallback", "capacity": "OnDemand", "pricePerHour": "3.50"},
]


KEEPING = {"storage": "s3://bucket/x", "everySteps": 4}


def test_checkpoints_of_a_job_whose_coordinator_is_new_or_gone_are_as_the_status_has_them() -> None:
    spec = job(checkpoint=KEEPING, nodePools=POOLS)
    status = written(
        "Suspended",
        checkpoint={"lastStep": 8, "lastTime": at(-90)},
        restores=2,
        cost={"total": "1"},
    )
    gone = looked(look(spec=spec, written=status), WHEN).checkpoint
    assert gone is not None
    assert (gone.place, gone.step, gone.at, gone.every_steps) == ("s3://bucket/x", 8, WHEN - 90, 4)
    assert gone.restores == 2
    unknown = checkpoints(step=None, place="s3://bucket/x", every_steps=4)
    new = looked(look(spec=spec, status=said(checkpoint=unknown), record=JobHistory(Time(WHEN)), written=status), WHEN)
    assert new.checkpoint is not None
    assert (new.checkpoint.step, new.checkpoint.at) == (8, WHEN - 90)
    assert looked(look(spec=job(), written=status), WHEN).checkpoint is None, "it keeps none"


def look(
    *,
    spec: JobSpec | None = None,
    facts: StatusFacts | None = None,
    written: Any = None,
    status: Status | None = None,
    record: JobHistory | None = None,
) -> OperatedJob:
    """written: the job's status as the API has it; status: its coordinator's."""
    spec = spec or job(nodePools=POOLS)
    facts = facts or StatusFacts(now=NOW, generation=1, spec=spec)
    return OperatedJob(view=viewed(spec, read_status(written), status), facts=facts, record=record)


def seen(since: float = -59.0, **more: Any) -> OperatedJob:
    return look(status=said(), record=JobHistory(Time(WHEN + since)), written=written(), **more)


@pytest.mark.parametrize(
    ("name", "tone", "over"),
    [
        ("Running", "good", False),
        ("Degraded", "warn", False),
        ("Pending", "idle", False),
        ("Saving", "idle", False),
        ("Suspended", "idle", False),
        ("Invalid", "bad", False),
        ("Failed", "bad", True),
        ("Complete", "good", True),
    ],
)
def test_without_a_coordinator_the_status_speaks(name: str, tone: str, over: bool) -> None:
    found = looked(look(written=written(name)), WHEN).state
    assert found == d.PageState(name=name, tone=tone, sentence=f"It is {name}.", over=over)


def test_a_job_that_has_only_just_been_seen() -> None:
    found = looked(look(spec=job()), WHEN)
    assert (found.state.name, found.grid, found.unknown, found.cost) == ("Pending", (), (), None)
    assert (found.progress.step, found.progress.steps, found.job.began) == (None, 10, None)


def test_a_job_whose_coordinator_has_only_just_begun() -> None:
    """Until its first status is written it has no conditions that could say more."""
    found = looked(look(status=said(phase="Pending"), record=JobHistory(Time(WHEN))), WHEN)
    assert (found.state.name, found.state.sentence) == ("Pending", "Waiting for enough workers to start.")


def test_a_job_that_is_over_shows_from_its_status() -> None:
    training = {"step": 10, "steps": 10, "loss": 2.5, "samplesPerSecond": 9.0, "etaSeconds": 0}
    status = written(
        "Complete",
        training=training,
        preemptions=4,
        takeovers=3,
        cost={"total": "1.2500"},
        plan='{"epoch":2,"pipelines":[["tiny-w0","tiny-w2"]]}',
    )
    found = looked(look(written=status), WHEN)
    assert (found.progress.step, found.progress.loss, found.progress.eta_seconds) == (10, 2.5, None)
    assert (found.counts.preemptions, found.counts.takeovers, found.counts.notices) == (4, 3, None)
    assert (found.grid, found.unknown, found.epoch) == ((), (NOT_SEEN,), 2)
    assert found.cost is not None
    assert (found.cost.total, found.cost.per_hour) == (1.25, 0.0)


def test_after_a_restart_what_is_unknown_is_said() -> None:
    """Until the workers are back, owners and progress are as the status has them; the past stays unknown."""
    status = written(training={"step": 300, "steps": 1000}, plan='{"pipelines":[["tiny-w0","tiny-w2"]]}', takeovers=7)
    away = replace(said(phase="Recovering"), grid=(), workers=(), step=0)
    recovering = look(written=status, status=away, record=JobHistory(Time(WHEN)))
    found = looked(recovering, WHEN)
    assert (found.state.name, found.progress.step) == ("Recovering", 300)
    assert [[(c.label, c.state, c.protected) for c in row] for row in found.grid] == [
        [("w0", "unknown", None), ("w2", "unknown", None)]
    ]
    assert found.unknown == (OWNERS_ONLY, RESTARTED)
    later = looked(look(written=status, status=said(step=301), record=JobHistory(Time(WHEN))), WHEN)
    assert (later.progress.step, later.counts.takeovers, later.unknown) == (301, 7, (RESTARTED,))
    assert looked(seen(), WHEN).unknown == ()


@pytest.mark.parametrize("plan", [None, "", "[]", "{}", '{"pipelines":3}', '{"pipelines":[3]}', "no JSON"])
def test_a_plan_that_cannot_be_read_is_no_grid(plan: Any) -> None:
    assert looked(look(written=written("Suspended", plan=plan)), WHEN).grid == ()


@pytest.mark.parametrize(
    ("pools", "sentence"),
    [
        ([{"name": "a"}], NO_PRICE),
        (POOLS[:1], ""),
        (
            [*POOLS[:1], {"name": "b", "capacity": "OnDemand"}],
            "Not included is what has no price: pool b.",
        ),
        ([*POOLS, {"name": "b"}], "Not included is what has no price: pool b."),
        (POOLS, ""),
    ],
)
def test_what_the_cost_lacks_is_said(pools: list[Any], sentence: str) -> None:
    found = looked(seen(spec=job(nodePools=pools)), WHEN).cost
    assert found is not None
    assert found.sentence == sentence
