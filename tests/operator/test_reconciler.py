"""A reconciliation that is stuck is reported."""

import asyncio

import pytest

from bamboo_operator.jobs.controller import STUCK_SECONDS
from bamboo_operator.jobs.reconciler import LONGEST_SECONDS
from bamboo_operator.pods.controller import PodController
from slow_api_kit import (
    ManyJobs,
    virtual_runner,
)


def test_a_reconciliation_that_is_stuck_is_reported_though_the_status_is_written_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stand_still(_: PodController) -> None:
        await asyncio.sleep(3600.0)

    monkeypatch.setattr(PodController, "reconcile", stand_still)
    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop)
        runner.run(simulated.run(1, 2 * (LONGEST_SECONDS + STUCK_SECONDS)))
    assert simulated.stuck[0].startswith("no reconciliation of default/job-00 for ")
