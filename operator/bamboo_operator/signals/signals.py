"""Signals of pods and nodes about a worker: a notice that it will be taken away, or its loss.

Pure functions of API objects and of the time. A signal lasts while the objects show it: None after a notice means that
the notice is withdrawn. `cloud_marks` has the names of the marks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

from bamboo_core.names import GRACE_SECONDS, LABEL_NOTICE_SECONDS, NOTICE_SECONDS, TRAINER_CONTAINER
from bamboo_operator.kube.objects import parsed_time
from bamboo_operator.signals import cloud_marks as marks
from bamboo_operator.signals.cloud_marks import DisruptionMark
from bamboo_operator.signals.node_marks import NodeMark

Json = Mapping[str, Any]

LEAST_SECONDS = 5.0  # a mark on a node, however old, must not end a live worker at once
KILLED = 137  # 128 + SIGKILL
ENDED_BY_SIGNAL = (KILLED, 143)
FAILED = "ContainerFailed"
POD_DELETED = "PodDeleted"
_RFC1123 = re.compile(r"[A-Z][a-z]{2}, \d{1,2} [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d [A-Z]{3}")
_OWN_LIMIT = re.compile(r"exceed.*\blimit")


class SignalKind(StrEnum):
    """The kind of a signal. NOTICE: the worker will be taken away. LOST: it is certainly gone."""

    NOTICE = "Notice"
    LOST = "Lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A signal that a worker will be taken away or is gone."""

    kind: SignalKind
    source: str  # a CamelCase reason
    message: str  # a sentence
    seconds: float = 0.0  # until the worker is gone; 0 if it is gone
    # the worker's exit code if it ended by itself; None for disruptions, which never count as failures
    exit_code: int | None = None


def worker_signal(pod: Json, node: Json | None, now: datetime, own: Sequence[NodeMark] = ()) -> Signal | None:
    """Return the strongest signal of a worker's pod and node; None if there is none. node: None if unknown.

    own: the installation's own marks. A container killed by a POSIX signal on a node that will be taken away did not
    fail: the returned Signal has no exit code.
    """
    of_pod = pod_signal(pod, now)
    of_node = node_signal(node, now, own) if node else None
    if of_pod and of_node and of_pod.source == FAILED and of_pod.exit_code in ENDED_BY_SIGNAL:
        return replace(of_pod, source=of_node.source, message=f"{of_pod.message}; {of_node.message}", exit_code=None)
    return _strongest(of_pod, of_node)


def _strongest(*signals: Signal | None) -> Signal | None:
    """Return the strongest signal: a loss before a notice, a shorter notice before a longer one; None without any."""
    found = (signal for signal in signals if signal)
    return min(found, key=lambda signal: (signal.kind is not SignalKind.LOST, signal.seconds), default=None)


def node_signal(node: Json, now: datetime, own: Sequence[NodeMark] = ()) -> Signal | None:
    """Return the strongest signal of a node's taints, conditions, labels, annotations and deletion; None without any.

    For a cloud's mark without a time, the label LABEL_NOTICE_SECONDS gives the seconds, else `cloud_marks`.
    """
    name = _metadata(node).get("name", "")
    usual = _own_seconds(node)
    signals = [_signal(name, mark, usual if left is None else left) for mark, left in _node_marks(node, now)]
    signals += [_signal(name, found.mark, None) for found in own if found.on(node)]
    return _strongest(*signals)


def node_deleted_signal(name: str) -> Signal:
    """Return the signal that workers are lost because the node of this name was deleted."""
    return Signal(kind=SignalKind.LOST, source="NodeDeleted", message=f"node {name} was deleted")


def pod_signal(pod: Json, now: datetime) -> Signal | None:
    """Return the signal of a pod's phase, conditions, deletion and containers; None without any."""
    name, disruption = _metadata(pod).get("name", ""), _disruption(pod)
    if (ended := worker_exit(pod)) is not None:
        if disruption:
            message = f"pod {name} {marks.DISRUPTIONS.get(disruption, 'is deleted')}"
            return Signal(kind=SignalKind.LOST, source=disruption, message=message)
        code, sentence = ended
        return Signal(kind=SignalKind.LOST, source=_exit_source(pod, code), message=sentence, exit_code=code)
    if disruption is None:
        return None
    message = f"pod {name} {marks.DISRUPTIONS.get(disruption, 'is being deleted')}"
    if disruption == marks.GONE_WITH_NODE:
        return Signal(kind=SignalKind.LOST, source=disruption, message=message)
    return Signal(kind=SignalKind.NOTICE, source=disruption, message=message, seconds=_grace_left(pod, now))


def pod_deleted_signal(name: str) -> Signal:
    """Return the signal of a deleted pod, whose worker ended in an unknown way."""
    return Signal(kind=SignalKind.LOST, source=POD_DELETED, message=f"pod {name} was deleted")


def worker_exit(pod: Json) -> tuple[int | None, str] | None:
    """Return how a worker ended: its exit code, and a sentence without its subject. None before its end.

    If the pod failed without a failed container, the code is KILLED if it exceeded its own limits, else None.
    """
    status = pod.get("status") or {}
    if terminated := _terminated(status.get("containerStatuses"), TRAINER_CONTAINER):
        return _code(terminated), _described(terminated)
    phase = status.get("phase")
    if phase == "Succeeded":
        return 0, "has ended"
    if phase != "Failed":
        return None
    for container in status.get("initContainerStatuses") or ():
        state = (container.get("state") or {}).get("terminated")
        if state and _code(state) != 0:
            return _code(state), f"could not start: init container {container.get('name')} {_described(state)}"
    why = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
    return (KILLED if _own_limit(status) else None), f"failed with its pod: {why or 'no reason is given'}"


def is_deleted(pod: Json) -> bool:
    """Return whether the pod's deletion was requested."""
    return _metadata(pod).get("deletionTimestamp") is not None


def lives(pod: Json) -> bool:
    """Return whether a pod's worker has not ended and the pod is not being deleted."""
    return worker_exit(pod) is None and not is_deleted(pod)


# Nodes


def _node_marks(node: Json, now: datetime) -> Iterator[tuple[DisruptionMark, float | None]]:
    """Yield the marks on a node with the seconds left, or None where the node does not give them."""
    metadata = _metadata(node)
    labels, forced = metadata.get("labels") or {}, _karpenter_seconds(metadata, now)
    for taint in (node.get("spec") or {}).get("taints") or ():
        if mark := _taint_mark(taint):
            yield mark, forced if mark.source.startswith("Karpenter") else _nth_seconds(taint["key"], mark, labels, now)
    for condition in (node.get("status") or {}).get("conditions") or ():
        if state := _condition_mark(condition):
            yield state, _azure_seconds(condition, now)
    for label, mark in marks.LABELS.items():
        if labels.get(label[0]) == label[1]:
            yield mark, None
    if forced is not None:
        yield marks.KARPENTER_TERMINATION, forced
    elif metadata.get("deletionTimestamp"):
        yield marks.DELETING, None


def _own_seconds(node: Json) -> float | None:
    """Return the seconds of notice in the node's label LABEL_NOTICE_SECONDS; None without a valid label."""
    text = str((_metadata(node).get("labels") or {}).get(LABEL_NOTICE_SECONDS, ""))
    return float(text) if NOTICE_SECONDS.fullmatch(text) else None


def _taint_mark(taint: Json) -> DisruptionMark | None:
    key = str(taint.get("key"))
    return marks.TAINTS.get(key) or marks.TAINTS_WITH_VALUE.get((key, str(taint.get("value") or "")))


def _condition_mark(condition: Json) -> DisruptionMark | None:
    kind, reason = condition.get("type"), condition.get("reason")
    if kind == "Ready":
        down = condition.get("status") == "False" and marks.SHUTTING_DOWN in str(condition.get("message"))
        return marks.SHUTDOWN if down else None
    if condition.get("status") != "True":
        return None
    return marks.CONDITIONS.get((str(kind), str(reason))) or marks.CONDITION_TYPES.get(str(kind))


def _karpenter_seconds(metadata: Json, now: datetime) -> float | None:
    """Return the seconds until Karpenter's deadline, on a spot node at most AWS' two minutes; None without a
    deadline.
    """
    deadline = parsed_time((metadata.get("annotations") or {}).get(marks.KARPENTER_DEADLINE))
    if deadline is None:
        return None
    left = (deadline - now).total_seconds()
    spot = (metadata.get("labels") or {}).get(marks.KARPENTER_CAPACITY) == "spot"
    return min(left, marks.AWS_SECONDS) if spot else left


def _nth_seconds(key: str, mark: DisruptionMark, labels: Json, now: datetime) -> float | None:
    acted = str(labels.get(marks.NTH_ACTION_TIME, ""))
    if mark.seconds is None or not key.startswith("aws-") or not (acted.isdecimal() and len(acted) <= 11):
        return None
    return int(acted) + mark.seconds - now.timestamp()


def _azure_seconds(condition: Json, now: datetime) -> float | None:
    date = _RFC1123.search(str(condition.get("message") or ""))
    try:
        when = parsedate_to_datetime(date.group()) if date else None
    except ValueError:
        return None
    return (when.replace(tzinfo=when.tzinfo or UTC) - now).total_seconds() if when else None


def _signal(name: str, mark: DisruptionMark, left: float | None) -> Signal:
    message = f"node {name} {mark.predicate}"
    if mark.seconds is None:
        return Signal(kind=SignalKind.LOST, source=mark.source, message=message)
    seconds = mark.seconds if left is None else max(LEAST_SECONDS, left)
    return Signal(kind=SignalKind.NOTICE, source=mark.source, message=message, seconds=seconds)


# Pods


def _disruption(pod: Json) -> str | None:
    """Return why a pod was or is being removed through no fault of its worker; None otherwise."""
    metadata, status = _metadata(pod), pod.get("status") or {}
    for condition in status.get("conditions") or ():
        targeted = condition.get("type") in marks.TARGETED and condition.get("status") == "True"
        if targeted and not _had_ended(pod, parsed_time(condition.get("lastTransitionTime"))):
            return condition.get("reason") or "DisruptionTarget"
    if (deadline := parsed_time(metadata.get("deletionTimestamp"))) is not None:
        asked = deadline.timestamp() - float(metadata.get("deletionGracePeriodSeconds") or 0)
        if not _had_ended(pod, datetime.fromtimestamp(asked, UTC)):
            return POD_DELETED
    if status.get("phase") != "Failed" or _own_limit(status):
        return None
    reason = status.get("reason")
    if reason in marks.DISRUPTIONS:
        return str(reason)
    containers = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    ran = any((c.get("state") or {}).get("terminated") for c in containers)
    return None if ran else str(reason or "PodFailed")  # such as OutOfcpu, when the node refused the pod


def _had_ended(pod: Json, since: datetime | None) -> bool:
    """Return whether the worker had ended by itself before that time."""
    terminated = _terminated((pod.get("status") or {}).get("containerStatuses"), TRAINER_CONTAINER)
    finished = parsed_time(terminated.get("finishedAt")) if terminated else None
    return finished is not None and since is not None and finished < since


def _own_limit(status: Json) -> bool:
    """Return whether a pod was evicted for exceeding its own limits, which counts as a failure."""
    return status.get("reason") == "Evicted" and bool(_OWN_LIMIT.search(str(status.get("message") or "")))


def _grace_left(pod: Json, now: datetime) -> float:
    deadline = parsed_time(_metadata(pod).get("deletionTimestamp"))
    if deadline is not None:
        return max(0.0, (deadline - now).total_seconds())
    return grace_period(pod)


def grace_period(pod: Json) -> float:
    """Return the seconds between SIGTERM and SIGKILL when a pod is deleted."""
    grace = (pod.get("spec") or {}).get("terminationGracePeriodSeconds")
    return float(GRACE_SECONDS if grace is None else grace)


def _exit_source(pod: Json, code: int | None) -> str:
    status = pod.get("status") or {}
    terminated = _terminated(status.get("containerStatuses"), TRAINER_CONTAINER) or {}
    if terminated.get("reason") == "OOMKilled":
        return "OOMKilled"
    if _own_limit(status):
        return "Evicted"
    return "ContainerCompleted" if code == 0 else FAILED


def _described(terminated: Json) -> str:
    """Return how a container ended, as a sentence without its subject. After a failure, add its message's last line."""
    code = _code(terminated)
    if terminated.get("reason") == "OOMKilled":
        sentence = f"ran out of memory and was killed (OOMKilled, exit code {code})"
    elif code in ENDED_BY_SIGNAL:
        sentence = f"was ended by {'SIGKILL' if code == KILLED else 'SIGTERM'} (exit code {code})"
    else:
        sentence = f"exited with code {code}"
    lines = str(terminated.get("message") or "").strip().splitlines()
    return f"{sentence}: {lines[-1].strip()[:300]}" if lines and code != 0 else sentence


def _terminated(statuses: Any, container: str) -> Json | None:
    for status in statuses or ():
        if status.get("name") == container:
            terminated: Json | None = (status.get("state") or {}).get("terminated")
            return terminated
    return None


def _code(terminated: Json) -> int:
    return int(terminated.get("exitCode") or 0)


# Both


def _metadata(thing: Json) -> Json:
    metadata: Json = thing.get("metadata") or {}
    return metadata
