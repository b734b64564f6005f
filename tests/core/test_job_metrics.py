"""Values of a job's metrics: its checkpoints, rollout and states, and the useful seconds of its steps."""

from dataclasses import replace
from itertools import product

import pytest

from bamboo_core.coordinator.events import AbandonReason, RestoreCause
from bamboo_core.metrics import catalog
from bamboo_core.metrics.exposition import MetricsPage
from bamboo_core.metrics.job_metrics import useful_seconds
from bamboo_operator.http.metrics import job_page
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.pods.rollout import RolloutRecord
from bamboo_operator.status.condition_rules import ConditionResult, displayed_state
from job_metrics_kit import exposed, kept, look, values
from operator_kit import NOW, said
from world import World


def test_what_became_of_checkpoints_is_told() -> None:
    page = MetricsPage()
    job_page(page, look(status=said(checkpoint=kept())), JobMeter(OperatorCounts()))
    told = {
        catalog.JOB_CHECKPOINT_STEP: {(): 8},
        catalog.JOB_CHECKPOINT_EVERY: {(): 4},
        catalog.JOB_CHECKPOINT_AGE: {(): 30.0},
        catalog.JOB_CHECKPOINT_DURATION: {(): 2},
        catalog.JOB_CHECKPOINT_STALL: {(): 2},
        catalog.JOB_CHECKPOINT_BYTES: {(): 250},
        catalog.JOB_REPEATED_STEPS: {(): 12},
        catalog.JOB_REPEATED_SECONDS: {(): 6.0},
        catalog.JOB_RESTORES: {(cause.value,): cause is RestoreCause.WORKERS_GONE for cause in RestoreCause},
        catalog.JOB_RESTORE_PROBLEMS: {("Damaged",): 1, ("Unreadable",): 0},
    }
    assert {metric: values(page, metric) for metric in told} == told
    abandoned = values(page, catalog.JOB_CHECKPOINTS_ABANDONED)
    assert abandoned == {(reason.value,): reason is AbandonReason.STORE_FAILED for reason in AbandonReason}
    text = exposed(page)
    assert 'bamboo_job_checkpoint_duration_seconds_sum{job="tiny",namespace="default"} 42.0' in text
    assert 'bamboo_job_checkpoint_stall_seconds_bucket{job="tiny",le="0.005",namespace="default"} 1.0' in text
    without = MetricsPage()
    job_page(without, look(), JobMeter(OperatorCounts()))
    assert not [family.name for family in without.families() if "checkpoint" in family.name and family.samples]


def test_how_far_a_rollout_is() -> None:
    page = MetricsPage()
    record = RolloutRecord(revision="a", since=NOW, moved=0.0, active=True, updated=1, total=2, stalled="no node")
    known = look()
    job_page(page, replace(known, facts=replace(known.facts, rollout=record)), JobMeter(OperatorCounts()))
    assert values(page, catalog.JOB_UPDATED_WORKERS) == {(): 1}
    told = values(page, catalog.JOB_ROLLOUT_STATE)
    assert told == {("Complete",): 0, ("Progressing",): 0, ("Stalled",): 1}
    unknown = MetricsPage()
    job_page(unknown, look(written={}), JobMeter(OperatorCounts()))
    assert not [family.name for family in unknown.families() if "rollout" in family.name and family.samples]


def test_the_states_are_those_of_the_status() -> None:
    names = ("Failed", "Complete", "Accepted", "Suspended", "Restoring", "Degraded", "Running")
    shown = {
        displayed_state({name: ConditionResult(holds, reason, "") for name, holds in zip(names, flags, strict=True)})
        for flags in product((True, False), repeat=len(names))
        for reason in ("Training", "JobDeleted")
    }
    assert shown == set(catalog.STATES)


def test_steps_are_worth_their_usual_duration_for_each_owner() -> None:
    world = World(stages=2, pipelines=2, standby=1)
    world.settle()
    steps = (0.1,) * 30
    before = replace(world.state, progress=replace(world.state.progress, trained=30, step_seconds=steps))

    def worth(seconds: float, count: int = 1) -> float:
        return useful_seconds(
            before,
            replace(before, progress=replace(before.progress, trained=30 + count, step_seconds=(*steps, seconds))),
        )

    assert worth(0.08) == pytest.approx(0.08 * 4)
    assert worth(5.0) == pytest.approx(0.1 * 4)  # the rest was a pause
    assert useful_seconds(before, before) == 0
    assert (
        useful_seconds(before, replace(before, progress=replace(before.progress, trained=31))) == 0
    )  # nobody said how long it took
    first = replace(before, progress=replace(before.progress, trained=0, step_seconds=()))
    assert useful_seconds(
        first, replace(first, progress=replace(first.progress, trained=1, step_seconds=(0.2,)))
    ) == pytest.approx(0.2 * 4)
    assert (
        useful_seconds(
            replace(before, plans=replace(before.plans, newest=None)),
            replace(
                before,
                progress=replace(before.progress, trained=31, step_seconds=(0.1,)),
                plans=replace(before.plans, newest=None),
            ),
        )
        == 0
    )
