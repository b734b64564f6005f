"""Workers that run and do not join."""

from datetime import UTC, datetime, timedelta
from typing import Any

from bamboo_operator.pods.starting.join_timeout import REPLACE_SECONDS, REPORT_SECONDS, join_problem, seconds_unjoined

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def pod(started: datetime | None) -> dict[str, Any]:
    state = {"running": {"startedAt": started.strftime("%Y-%m-%dT%H:%M:%SZ")}} if started else {"waiting": {}}
    return {"status": {"containerStatuses": [{"name": "trainer", "state": state}]}}


def test_only_workers_that_run_and_have_not_joined_are_silent() -> None:
    pods = {
        "job-w0": pod(NOW - timedelta(seconds=300)),
        "job-w1": pod(NOW - timedelta(seconds=90)),
        "job-w2": pod(None),
        "job-w3": {"status": {"phase": "Pending"}},
    }
    assert seconds_unjoined(pods, {"job-w0"}, NOW - timedelta(hours=1), NOW) == {"job-w1": 90.0}
    assert seconds_unjoined(pods, {"job-w0"}, NOW - timedelta(seconds=20), NOW) == {"job-w1": 20.0}


def test_silence_is_told_once_it_lasts() -> None:
    assert join_problem({"job-w1": REPORT_SECONDS - 1}, "ws://x") is None
    found = join_problem({"job-w1": REPORT_SECONDS, "job-w2": REPLACE_SECONDS}, "ws://x")
    assert found is not None
    assert found.reason == "WorkerSilent"
    assert found.message.startswith("2 worker(s) are running but have not connected to ws://x: see the log of job-w1")
