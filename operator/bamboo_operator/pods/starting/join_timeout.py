"""Timeouts of workers that run and do not connect to the operator: reported after a while, later replaced."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from bamboo_core.names import TRAINER_CONTAINER
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.pods.starting.startup_problems import StartupProblem

REPORT_SECONDS, REPLACE_SECONDS = 60.0, 600.0


def seconds_unjoined(
    pods: Mapping[WorkerId, Mapping[str, Any]], joined: Collection[WorkerId], since: datetime, now: datetime
) -> dict[WorkerId, float]:
    """Return by worker the seconds for which its containers have run without the worker having joined.

    since: when the operator began to listen, before which no worker could join.
    """
    began = {name: _running_since(pod) for name, pod in pods.items() if name not in joined}
    return {name: (now - max(at, since)).total_seconds() for name, at in began.items() if at is not None}


def join_problem(unjoined: Mapping[WorkerId, float], url: str) -> StartupProblem | None:
    """Return the report on workers that run and have not connected; None if none is late. url: the address that workers
    connect to.
    """
    late = sorted(name for name, seconds in unjoined.items() if seconds >= REPORT_SECONDS)
    if not late:
        return None
    return StartupProblem(
        "WorkerSilent",
        f"{len(late)} worker(s) are running but have not connected to {url}: see the log of {late[0]}, and check"
        " that the network lets it through",
    )


def _running_since(pod: Mapping[str, Any]) -> datetime | None:
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        started = ((status.get("state") or {}).get("running") or {}).get("startedAt")
        if status.get("name") == TRAINER_CONTAINER and isinstance(started, str):
            return datetime.fromisoformat(started)
    return None
