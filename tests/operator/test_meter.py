"""The operator's counts: useful time and samples of a job, reconciliations by result, and late ticks."""

from dataclasses import replace

import pytest

from bamboo_core.coordinator.events import Tick
from bamboo_operator.jobs import meter
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from world import World


def test_useful_work_and_samples_are_counted_with_each_committed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(meter.time, "time", lambda: now)
    counts = OperatorCounts()
    job = JobMeter(counts)
    before = World(2, 1, 0).state
    job.handled(Tick(), before, before)
    assert (job.useful, job.samples, job.committed, counts.events["Tick"]) == (0.0, 0, 1000.0, 1)
    now = 1010.0
    after = replace(
        before,
        progress=replace(
            before.progress, step=before.step + 1, trained=before.progress.trained + 1, step_seconds=(0.5,)
        ),
    )
    job.handled(Tick(), before, after)
    assert job.committed == 1010.0
    assert job.samples == 8


def test_reconciliations_are_counted_by_result_and_delays_are_never_negative() -> None:
    counts = OperatorCounts()
    job = JobMeter(counts)
    job.reconciled(0.2, ok=True)
    job.reconciled(0.3, ok=False)
    job.tick_delayed(-1.0)
    assert counts.reconciles == {"ok": 1, "failed": 1}
    assert (counts.reconcile_seconds.total, counts.tick_delay.total) == (0.5, 0.0)
