"""When a job is looked at, and when its status is written."""

from collections import Counter

import pytest

from bamboo_operator.jobs import reconciler
from bamboo_operator.jobs.reconcile_schedule import QUIET_SECONDS
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobKey
from slow_api_kit import JOBS, ManyJobs, virtual_runner

IDLE_SECONDS = 900.0


def test_idle_jobs_are_looked_at_only_when_something_happens_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that nobody knew of is removed at once all the same, and an edit is followed."""
    looks: Counter[str] = Counter()

    class Counted(ApiAttempts):
        def __init__(self, key: JobKey) -> None:
            super().__init__(key)
            self.name = key[1]

        def heartbeat(self) -> None:
            looks[self.name] += 1
            super().heartbeat()

    monkeypatch.setattr(reconciler, "ApiAttempts", Counted)
    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop, slowness=1.0, suspended=True)
        loop.call_later(0.45 * IDLE_SECONDS, simulated.bring_late_pod, "job-00")
        runner.run(simulated.run(JOBS, IDLE_SECONDS))
        removed = [at for what, at in simulated.pods if what == "DELETED"]
    assert simulated.stuck == []
    assert [int(at - 0.45 * IDLE_SECONDS) < QUIET_SECONDS / 10 for at in removed] == [True]
    quiet = [looks[f"job-{number:02}"] for number in range(1, JOBS)]
    assert max(quiet) <= 2 * (IDLE_SECONDS / QUIET_SECONDS + 4), "twice at each look"
