"""Workers that run and do not come to the operator: told after a while, and replaced after a longer one."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from bamboo.names import TRAINER_CONTAINER
from bamboo.planning.plan import WorkerId
from bamboo_operator.troubles import Trouble

TOLD_SECONDS, REPLACED_SECONDS = 60.0, 600.0


def silent(
    pods: Mapping[WorkerId, Mapping[str, Any]], joined: Collection[WorkerId], since: datetime, now: datetime
) -> dict[WorkerId, float]:
    """Of these living workers' pods, those whose container runs and that have not joined; for how many seconds.

    since: when the operator began to listen, before which nobody could join.
    """
    began = {name: _running_since(pod) for name, pod in pods.items() if name not in joined}
    return {name: (now - max(at, since)).total_seconds() for name, at in began.items() if at is not None}


def trouble(silences: Mapping[WorkerId, float], url: str) -> Trouble | None:
    """What the user is told. url: where the workers should come to."""
    late = sorted(name for name, seconds in silences.items() if seconds >= TOLD_SECONDS)
    if not late:
        return None
    return Trouble(
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
