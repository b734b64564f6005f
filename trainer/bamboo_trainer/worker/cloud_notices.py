"""What the clouds' metadata endpoints say of the node that this worker is on: nothing, or that it will be taken away.

Pure functions of the environment, of an answer and of the time; `metadata_watch` asks. A reader raises Unclear if the
answer is not one: then nothing has changed, and it has to be asked again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import TypeVar

import msgspec

from bamboo_core.names import (
    ENV_METADATA,
    ENV_METADATA_ACKNOWLEDGE,
    ENV_METADATA_GCP_SECONDS,
    ENV_METADATA_REBALANCE,
    ENV_METADATA_URL,
    METADATA_CHOICES,
)

DEFAULT_URL = "http://169.254.169.254"  # of all three; the address needs no name server

AWS_TOKEN = "/latest/api/token"  # noqa: S105 - a path
AWS_TOKEN_ASK = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
AWS_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

GCP_ROOT = "/computeMetadata/v1/"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
GCP_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
GCP_FLAVOR = {"Metadata-Flavor": "Google"}

AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_ASK = {"Metadata": "true"}

MOST_SECONDS = 3600.0
LEAST_SECONDS = 5.0  # a cloud's word alone must not end a worker that still talks
AWS_SECONDS = 120.0
GCP_PREEMPTED_SECONDS = 30.0
GCP_MAINTENANCE_SECONDS = 60.0
# By the type of event, for one that has no time. A Freeze is left out: it takes seconds, and the worker stays.
AZURE_SECONDS = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0}

T = TypeVar("T")


class Unclear(ValueError):
    """An answer that says nothing of the node; the text says what is wrong with it."""


class Cloud(StrEnum):
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """cloud: None to find it out. rebalance: a recommendation of AWS is a notice, too; else it is only logged.

    acknowledge: once the worker has left, Azure is told that it need not wait. gcp_seconds: the notice of a preemption
    by GCP, whose metadata does not say when its nodes' `preemptionNoticeDuration` is over.
    """

    cloud: Cloud | None
    url: str = DEFAULT_URL
    rebalance: bool = False
    acknowledge: bool = False
    gcp_seconds: float = GCP_PREEMPTED_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNotice:
    """source: a CamelCase reason. said: what tells this notice from the next. message completes "this node ...".

    seconds: what is left. events: Azure's, that concern nobody but this node and have not begun.
    """

    source: str
    said: str
    message: str
    seconds: float
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    notice: CloudNotice


def wanted(environment: Mapping[str, str]) -> Wanted | None:
    """None if nothing is to be watched. Raises ValueError with a sentence."""
    choice = environment.get(ENV_METADATA) or "off"
    if choice not in METADATA_CHOICES:
        raise ValueError(f'{ENV_METADATA}: expected one of {", ".join(METADATA_CHOICES)}, got "{choice}"')
    if choice == "off":
        return None
    url = environment.get(ENV_METADATA_URL) or DEFAULT_URL
    if not url.startswith(("http://", "https://")):
        raise ValueError(f'{ENV_METADATA_URL}: expected http://HOST[:PORT], got "{url}"')
    return Wanted(
        cloud=None if choice == "auto" else Cloud(choice),
        url=url.rstrip("/"),
        rebalance=_switch(environment, ENV_METADATA_REBALANCE),
        acknowledge=_switch(environment, ENV_METADATA_ACKNOWLEDGE),
        gcp_seconds=_seconds(environment, ENV_METADATA_GCP_SECONDS, GCP_PREEMPTED_SECONDS),
    )


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name) or "false"
    if text not in ("true", "false"):
        raise ValueError(f'{name}: expected true or false, got "{text}"')
    return text == "true"


def _seconds(environment: Mapping[str, str], name: str, usual: float) -> float:
    text = environment.get(name) or f"{usual:.0f}"
    if not text.isdecimal() or not LEAST_SECONDS <= int(text) <= MOST_SECONDS:
        raise ValueError(f'{name}: expected whole seconds, {LEAST_SECONDS:.0f} to {MOST_SECONDS:.0f}, got "{text}"')
    return float(text)


def news(before: CloudNotice | None, after: CloudNotice | None) -> CloudNotice | Withdrawn | None:
    """What there is to tell when one look found `before`, and the next one `after`."""
    if after is None:
        return Withdrawn(before) if before else None
    return after if before is None or before.said != after.said else None


# AWS


class _Action(msgspec.Struct):
    action: str
    time: str


class _Recommendation(msgspec.Struct, rename="camel"):
    notice_time: str


def aws_token(answer: Answer) -> str:
    token = _text(answer, "AWS's token").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise Unclear("AWS's token: the answer holds none")
    return token


def aws_action(answer: Answer, now: datetime) -> CloudNotice | None:
    """The notice in an answer about a spot instance; None if there is none. Hibernation is announced when it begins."""
    if answer.status == 404:
        return None
    found = _read(answer, _Action, AWS_ACTION)
    when = _iso(found.time, AWS_ACTION)
    if found.action not in ("terminate", "stop", "hibernate"):
        raise Unclear(f'{AWS_ACTION}: no such action is known: "{found.action[:40]}"')
    left = min(AWS_SECONDS, _left(when, now)) if found.action != "hibernate" else LEAST_SECONDS
    return CloudNotice(
        source="AwsSpotInterruption",
        said=f"{found.action} {found.time}",
        message=f"is being reclaimed by AWS ({found.action} at {found.time})",
        seconds=left,
    )


def aws_rebalance(answer: Answer, now: datetime) -> CloudNotice | None:
    """It names no end; as much time as an interruption would leave is taken."""
    if answer.status == 404:
        return None
    since = _read(answer, _Recommendation, AWS_REBALANCE).notice_time
    _iso(since, AWS_REBALANCE)
    message = f"may soon be reclaimed by AWS (rebalance recommendation of {since})"
    return CloudNotice(source="AwsRebalanceRecommendation", said=since, message=message, seconds=AWS_SECONDS)


# GCP


def is_gcp(answer: Answer) -> bool:
    return answer.status == 200 and answer.headers.get("Metadata-Flavor") == "Google"


def gcp_preempted(answer: Answer, now: datetime, seconds: float = GCP_PREEMPTED_SECONDS) -> CloudNotice | None:
    """seconds: what GCP leaves, which its answer does not say."""
    said = _text(answer, GCP_PREEMPTED).strip()
    if said == "FALSE":
        return None
    if said != "TRUE":
        raise Unclear(f'{GCP_PREEMPTED}: expected TRUE or FALSE, got "{said[:40]}"')
    message = "is being reclaimed by GCP"
    return CloudNotice(source="GcpPreempted", said=said, message=message, seconds=seconds)


def gcp_maintenance(answer: Answer, now: datetime) -> CloudNotice | None:
    """A node that migrates keeps its worker. One with a GPU has an hour; leaving early costs it nothing."""
    said = _text(answer, GCP_MAINTENANCE).strip()
    if said in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"):
        return None
    if said != "TERMINATE_ON_HOST_MAINTENANCE":
        raise Unclear(f'{GCP_MAINTENANCE}: no such event is known: "{said[:40]}"')
    message = "is to be stopped for maintenance by GCP"
    return CloudNotice(source="GcpMaintenance", said=said, message=message, seconds=GCP_MAINTENANCE_SECONDS)


# Azure


class _Event(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    resource_type: str = "VirtualMachine"
    resources: tuple[str, ...] = ()
    event_status: str = "Scheduled"
    not_before: str | None = None


class _Events(msgspec.Struct, rename="pascal"):
    events: tuple[_Event, ...]


def azure_name(answer: Answer) -> str:
    """The name under which events list this node: they are told to all nodes of a scale set."""
    name = _text(answer, "Azure's name of this node").strip()
    if not name or len(name) > 200 or not name.isprintable():
        raise Unclear("Azure's name of this node: the answer holds none")
    return name


def azure_events(answer: Answer, node: str, now: datetime) -> CloudNotice | None:
    """The strongest of what is scheduled for this node, or has begun."""
    found = [e for e in _read(answer, _Events, "Azure's scheduled events").events if _concerns(e, node)]
    if not found:
        return None
    seconds = {e.event_id: _azure_left(e, now) for e in found}
    first = min(found, key=lambda e: seconds[e.event_id])
    return CloudNotice(
        source=f"Azure{first.event_type}",
        said=" ".join(sorted(f"{e.event_id}:{e.event_status}" for e in found)),
        message=f"will be taken away by Azure's event {first.event_type} {first.event_id}",
        seconds=seconds[first.event_id],
        # An event that is acknowledged begins for all its nodes.
        events=tuple(e.event_id for e in found if e.event_status == "Scheduled" and len(e.resources) == 1),
    )


def azure_acknowledgement(events: Iterable[str]) -> bytes:
    return msgspec.json.encode({"StartRequests": [{"EventId": event} for event in events]})


def _concerns(event: _Event, node: str) -> bool:
    return (
        event.event_type in AZURE_SECONDS
        and event.resource_type == "VirtualMachine"
        and event.event_status in ("Scheduled", "Started")
        and node.casefold() in (name.casefold() for name in event.resources)
    )


def _azure_left(event: _Event, now: datetime) -> float:
    """An event that has begun has no time any more."""
    if event.event_status == "Started":
        return LEAST_SECONDS
    try:
        return _left(_aware(parsedate_to_datetime(event.not_before)), now) if event.not_before else _usual(event)
    except ValueError:
        return _usual(event)


def _usual(event: _Event) -> float:
    return AZURE_SECONDS[event.event_type]


# All


def _text(answer: Answer, what: str) -> str:
    if answer.status != 200:
        raise Unclear(f"{what}: the answer is {answer.status}")
    return answer.body


def _read(answer: Answer, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(_text(answer, what), type=kind)
    except msgspec.DecodeError as error:
        raise Unclear(f"{what}: the answer is malformed: {error}") from None


def _iso(text: str, what: str) -> datetime:
    try:
        return _aware(datetime.fromisoformat(text))
    except ValueError:
        raise Unclear(f'{what}: expected a time, got "{text[:40]}"') from None


def _aware(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _left(when: datetime, now: datetime) -> float:
    return max(LEAST_SECONDS, (when - now).total_seconds())
