"""What EvictionRequests ask of workers, and what their responder answers: pure functions of an Eviction and the time.

Kubernetes (lifecycle.k8s.io/v1alpha1, since 1.37) makes an Eviction of all requests for one pod, and lets the pod's
responders act one after the other. The operator is one of those of its workers. While it is the active one the worker
has a notice like any other. A worker that could not be spared in time is left to the next responder, the eviction API,
which heeds the job's PodDisruptionBudget: unlike a machine's end, an eviction that is asked for can wait.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from bamboo_core.names import EVICTION_RESPONDER
from bamboo_operator.kube.objects import api_time, parsed_time
from bamboo_operator.signals.signals import Signal, SignalKind, worker_exit

Json = Mapping[str, Any]

EVICTION_SECONDS = 300.0  # the notice; without a spare worker a neighbour takes over when half of it has passed
PASS_ON_SECONDS = 270.0  # after which the eviction is passed on, before the notice has run out
HEARTBEAT_SECONDS = 60.0  # Kubernetes waits for 20 minutes, and asks for no more than three in a minute
SOURCE = "EvictionRequest"
PRIORITY = 10_000  # that of the controller that manages a pod
RESPONDER = {"name": EVICTION_RESPONDER, "priority": PRIORITY}


@dataclass(frozen=True, slots=True)
class _Turn:
    """That it is the operator's turn. started: since when."""

    started: datetime
    heartbeat: datetime | None


def eviction_signal(eviction: Json, now: datetime) -> Signal | None:
    """The notice of the pod's worker; None if it is not the operator's turn: not yet, no more, or withdrawn."""
    turn = _turn(eviction, now)
    if turn is None:
        return None
    left = EVICTION_SECONDS - (now - turn.started).total_seconds()
    message = f"pod {target(eviction).get('name')} is to be evicted, as {_requesters(eviction)} asks"
    return Signal(kind=SignalKind.NOTICE, source=SOURCE, message=message, seconds=max(0.0, left))


def answer(eviction: Json, pod: Json | None, now: datetime, *, trains: bool) -> dict[str, str] | None:
    """The operator's ResponderStatus without its name, if there is something to write.

    pod: the worker's, None if that very pod is gone. trains: somebody looks after its job.
    """
    turn = _turn(eviction, now)
    if turn is None:
        return None
    if (done := _completion(pod, now - turn.started, trains=trains)) is not None:
        return {"heartbeatTime": api_time(now), "completionTime": api_time(now), "message": done}
    if turn.heartbeat is not None and (now - turn.heartbeat).total_seconds() < HEARTBEAT_SECONDS:
        return None
    return {
        "heartbeatTime": api_time(now),
        "expectedCompletionTime": api_time(turn.started + timedelta(seconds=PASS_ON_SECONDS)),
        "message": "the worker leaves as soon as another one has taken over what it holds",
    }


def target(eviction: Json) -> Json:
    """Name and uid of the pod; empty if the Eviction is about something else."""
    return ((eviction.get("spec") or {}).get("target") or {}).get("pod") or {}


def _completion(pod: Json | None, since: timedelta, *, trains: bool) -> str | None:
    """Why the operator has no more to do, a sentence; None while the worker is about to leave."""
    if pod is None or worker_exit(pod) is not None:
        return "the worker has left"
    if not trains or (pod.get("status") or {}).get("phase") != "Running":
        return "the worker holds nothing"
    if since.total_seconds() >= PASS_ON_SECONDS:
        return f"no other worker could take over in {PASS_ON_SECONDS:.0f} s; the eviction API may try"
    return None


def _turn(eviction: Json, now: datetime) -> _Turn | None:
    """None if the operator is not the active responder, or has said that it is done."""
    status = eviction.get("status") or {}
    if _of_operator(status.get("targetResponders")).get("state") != "Active":
        return None
    said = _of_operator(status.get("responders"))
    if said.get("completionTime"):
        return None
    return _Turn(parsed_time(said.get("startTime")) or now, parsed_time(said.get("heartbeatTime")))


def _of_operator(responders: Iterable[Json] | None) -> Json:
    return next((one for one in responders or () if one.get("name") == EVICTION_RESPONDER), {})


def _requesters(eviction: Json) -> str:
    """Those that ask for the eviction still."""
    all_of_them = (eviction.get("status") or {}).get("requesters") or ()
    asking = [str(one.get("name")) for one in all_of_them if one.get("intent") == "Eviction"]
    return ", ".join(asking) or "an EvictionRequest"
