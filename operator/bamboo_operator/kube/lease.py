"""The Kubernetes Lease that lets only one operator work at a time.

If the kubelet of an operator's pod hangs, a Deployment with one replica creates a second pod while the first process
still lives, and workers would obey two coordinators. So no operator opens the workers' port without the Lease.

Two operators can still work at once in two cases, until the earlier one reads that the Lease has another holder. A
holder that cannot reach the API server goes on working, because its workers still need takeovers and no other operator
can decide better while they are connected to it. A holder whose pod was deleted by force while another operator waited
works for at most NOTICE_SECONDS more.

The official client's leader election (37.0.2) is not used: it fails without an existing Lease, ends silently when the
API server is away, notices another holder only after 5 minutes if a renewal hangs, never releases the Lease, and does
not look at pods (measured at b11a1fe3).

The Service selects the active operator by a label on its pod: operators that wait for the Lease are ready, too, so that
a Deployment with several replicas is available.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any

from bamboo_core.complaints import said_by
from bamboo_core.job.text_patterns import DNS_LABEL, DNS_NAME
from bamboo_core.kube.api import KubeApi, Object
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.names import LABEL_ACTIVE
from bamboo_operator.kube.access import TIMEOUT_SECONDS
from bamboo_operator.kube.attempts import ApiAttempts, described
from bamboo_operator.kube.objects import utc_now

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
DURATION_SECONDS = 30  # without a renewal, until another operator may take it
POLL_SECONDS = 2.0  # between reads while waiting, or after a failed renewal
NOTICE_SECONDS = RENEW_SECONDS + TIMEOUT_SECONDS  # in which an earlier holder notices that it lost the Lease
LOG_AGAIN_SECONDS = 60.0
LEASE_CONNECTIONS = 2
OVER = ("Failed", "Succeeded")  # phases of a pod that has ended
BEFORE = "bamboo.dev/holders-before"  # annotation of the Lease: holders that may not have noticed the loss


class LeaseLost(Exception):
    """Error because another operator holds the Lease."""


@dataclass(frozen=True, slots=True)
class LeaseName:
    """The namespace and name of a Lease."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "LeaseName":
        """Parse NAMESPACE/NAME. Raises ValueError."""
        namespace, _, name = text.partition("/")
        if not (DNS_LABEL.fits(namespace) and DNS_NAME.fits(name)):
            raise ValueError(f'expected NAMESPACE/NAME, got "{text}"')
        return cls(namespace, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The content of a Lease.

    holder: "" if no operator holds the Lease. seconds: time without a renewal after which another operator may take it.
    before: earlier holders that may not have noticed the loss yet.
    """

    holder: str
    seconds: float
    renewed: str
    transitions: int
    before: tuple[str, ...] = ()

    @classmethod
    def of(cls, lease: Mapping[str, Any]) -> "LeaseRecord":
        spec, annotations = lease.get("spec") or {}, lease["metadata"].get("annotations") or {}
        return cls(
            holder=spec.get("holderIdentity") or "",
            seconds=float(spec.get("leaseDurationSeconds") or DURATION_SECONDS),
            renewed=spec.get("renewTime") or "",
            transitions=int(spec.get("leaseTransitions") or 0),
            before=tuple(filter(None, annotations.get(BEFORE, "").split(","))),
        )


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease's record, and the time (monotonic seconds) since which this operator has seen it unchanged.

    Time in which the API server did not answer does not count.
    """

    record: LeaseRecord
    since: float

    def after(self, record: LeaseRecord, now: float) -> "ObservedLease":
        return ObservedLease(record, self.since if record == self.record else now)


class HolderPod(StrEnum):
    """The state of the pod of a present or earlier holder of the Lease."""

    LIVES = "Lives"
    LEAVES = "Leaves"  # it is being deleted; its processes may still live
    OVER = "Over"  # it is gone, or has ended
    UNKNOWN = "Unknown"  # also if the holder is no pod


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseDecision:
    """The decision whether to take a Lease now. notice: earlier holders that must notice the loss before this operator
    works. message: the reason.
    """

    take: bool
    notice: tuple[str, ...] = ()
    message: str


def decide(observed: ObservedLease | None, me: str, now: float, pod: HolderPod) -> LeaseDecision:
    """Decide whether to take the Lease. observed: None without a Lease. pod: the state of another holder's pod.

    No clock of another machine counts: a holder's seconds start when this operator first sees its newest renewal.
    """
    if observed is None:
        return LeaseDecision(take=True, message="there was none")
    record, unrenewed = observed.record, now - observed.since
    holder, before = record.holder, tuple(name for name in record.before if name != me)
    if holder == me:
        return LeaseDecision(take=True, notice=before, message="it was ours")
    if not holder:
        return LeaseDecision(take=True, notice=before, message="nobody held it")
    if pod is HolderPod.OVER:
        message = f"the pod of {holder} is gone or has ended"
        return LeaseDecision(take=True, notice=before, message=message)
    if unrenewed >= record.seconds:
        message = f"{holder} has not renewed it for {unrenewed:.0f} s"
        return LeaseDecision(take=True, notice=before, message=message)
    if pod is HolderPod.LEAVES:
        message = f"the pod of {holder} is being deleted"
        return LeaseDecision(take=True, notice=(*before, holder), message=message)
    return LeaseDecision(take=False, message=f"{holder} holds it")


def pod_of_holder(pod: Mapping[str, Any]) -> HolderPod:
    if (pod.get("status") or {}).get("phase") in OVER:
        return HolderPod.OVER
    return HolderPod.LEAVES if pod["metadata"].get("deletionTimestamp") else HolderPod.LIVES


def lease_held_by(
    place: LeaseName, lease: Object | None, me: str, now: datetime, before: tuple[str, ...] = ()
) -> Object:
    """Return the Lease as taken or renewed by `me`; other fields stay. lease: the current one; None creates it. before:
    earlier holders that may not have noticed the loss yet.
    """
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec: Object = {"holderIdentity": me, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": stamp}
    if lease is None:
        metadata = {"namespace": place.namespace, "name": place.name}
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        return {**kind, "spec": {**spec, "acquireTime": stamp, "leaseTransitions": 0}}
    record = LeaseRecord.of(lease)
    if record.holder != me:
        spec |= {"acquireTime": stamp, "leaseTransitions": record.transitions + 1}
    notes = {name: value for name, value in (lease["metadata"].get("annotations") or {}).items() if name != BEFORE}
    notes |= {BEFORE: ",".join(before)} if before else {}
    return {
        **lease,
        "metadata": {**lease["metadata"], "annotations": notes},
        "spec": {**(lease.get("spec") or {}), **spec},
    }


def released(lease: Object) -> Object:
    return {**lease, "spec": {**lease["spec"], "holderIdentity": ""}}


# the operator's Lease


class Lease:
    """The acquisition, renewal and release of the operator's Lease. place: the Lease's name. me: the operator's
    identity; in a pod, the pod's name. Call acquire() first, then run keep() alongside settle() and the work.
    """

    def __init__(
        self,
        api: KubeApi,
        place: LeaseName,
        me: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.waiting: str | None = None  # what it waits for, if anything
        self.stands_by = False  # whether another operator holds it
        self.predecessors: tuple[str, ...] = ()  # operators that may not have noticed the new holder
        self._api, self._place, self._me = api, place, me
        self._clock, self._sleep = clock, sleep
        self._lease: Object | None = None  # as it was last read or written
        self._observed: ObservedLease | None = None
        self._looked, self._blind = 0.0, False  # time of the last read; no answer from the API server since
        self._before: tuple[str, ...] = ()  # operators that must notice first
        self._pods: set[str] = set()  # holders whose pods were seen
        self._logged_failure: float | None = None

    async def acquire(self) -> None:
        """Wait until this operator holds the Lease. May be cancelled at any time; call release() even then."""
        self.waiting = "waiting for the lease"
        logged = ""
        while True:
            try:
                decision = await self._judge(await self._read())
                if decision.take and await self._take():
                    break
            except RemoteError as error:
                self.stands_by, self._blind = False, True
                self._log_failure("cannot take", error)
            else:
                self.stands_by = not decision.take
                holder = LeaseRecord.of(self._lease).holder if self._lease else ""
                if not decision.take and holder != logged:
                    logger.info("waiting for the lease %s held by %s", self._place, holder)
                    self.waiting, logged = f"waiting for the lease held by {holder}", holder
            await self._sleep(POLL_SECONDS)
        logger.info("holds the lease %s as %s: %s", self._place, self._me, decision.message)
        self.waiting, self._logged_failure, self.stands_by = None, None, False
        self.predecessors = self._before

    async def settle(self) -> None:
        """Wait until earlier holders have ended, or had NOTICE_SECONDS to notice that they lost the Lease."""
        if not self._before:
            return
        self.waiting = f"waiting until {' and '.join(self._before)} has ended"
        logger.info("%s, at most %.0f s", self.waiting, NOTICE_SECONDS)
        end = self._clock() + NOTICE_SECONDS
        while self._clock() < end:
            try:
                if all([await self._pod(name) is HolderPod.OVER for name in self._before]):
                    break
            except RemoteError as error:
                self._log_failure("cannot see who held", error)
            await self._sleep(POLL_SECONDS)
        self.waiting, self._before = None, ()

    async def keep(self) -> None:
        """Renew the Lease until cancelled. Raises LeaseLost if another operator holds it.

        While the API server is away, this retries and the operator goes on working, because no other operator can take
        over for the workers that are connected to it.
        """
        seconds = RENEW_SECONDS
        while True:
            await self._sleep(seconds)
            try:
                await self._renew()
            except RemoteError as error:
                self._log_failure("cannot renew", error)
                seconds = POLL_SECONDS
                continue
            if self._logged_failure is not None:
                logger.info("the lease %s is renewed again", self._place)
            self._logged_failure, seconds = None, RENEW_SECONDS

    async def release(self) -> None:
        """Release the Lease if this operator holds it. May raise RemoteError."""
        lease = await self._read()
        if lease is not None and LeaseRecord.of(lease).holder == self._me:
            await self._api.replace_lease(released(lease))
            logger.info("the lease %s is released", self._place)

    async def _judge(self, lease: Object | None) -> LeaseDecision:
        """Decide whether to take the Lease, and note its state. lease: as just read; None if it does not exist."""
        self._lease = lease
        if lease is None:
            self._observed, self._before = None, ()
            return decide(None, self._me, self._clock(), HolderPod.UNKNOWN)
        record, now = LeaseRecord.of(lease), self._clock()
        if self._observed and self._blind:  # the holder could not renew it either
            self._observed = replace(self._observed, since=self._observed.since + now - self._looked)
        self._observed = self._observed.after(record, now) if self._observed else ObservedLease(record, now)
        self._looked, self._blind = now, False
        other = record.holder not in (self._me, "")
        pod = await self._pod(record.holder) if other else HolderPod.UNKNOWN
        decision = decide(self._observed, self._me, now, pod)
        self._before = decision.notice
        return decision

    async def _renew(self) -> None:
        if await self._take():
            return
        lease = await self._read()
        if lease is not None and (holder := LeaseRecord.of(lease).holder) not in (self._me, ""):
            raise LeaseLost(f"{holder} holds the lease {self._place} now")
        if not await self._take():
            raise ApiError(409, "Conflict", "the lease changes all the time")

    async def _take(self) -> bool:
        """Take or renew the Lease; return False if it was created, changed or deleted since the last read. Raises
        RemoteError.
        """
        wanted = lease_held_by(self._place, self._lease, self._me, utc_now(), self._before)
        new = self._lease is None
        try:
            self._lease = await (self._api.create_lease if new else self._api.replace_lease)(wanted)
        except ApiError as error:
            if error.status == 409 or (error.status == 404 and not new):
                return False
            raise
        return True

    async def _read(self) -> Object | None:
        self._lease = await self._api.read_lease(self._place.namespace, self._place.name)
        return self._lease

    async def _pod(self, holder: str) -> HolderPod:
        """Return the state of the holder's pod.

        An operator outside the cluster lives without a pod, so only a pod that was seen before can be gone.
        """
        if not DNS_NAME.fits(holder):
            return HolderPod.UNKNOWN
        try:
            pod = await self._api.read_pod(self._place.namespace, holder)
        except ApiError as error:
            if error.status == 404:
                return HolderPod.OVER if holder in self._pods else HolderPod.UNKNOWN
            if error.status == 403:
                return HolderPod.UNKNOWN
            raise
        self._pods.add(holder)
        return pod_of_holder(pod)

    def _log_failure(self, what: str, error: RemoteError) -> None:
        """Log a failure, at most once in LOG_AGAIN_SECONDS."""
        now = self._clock()
        if self._logged_failure is None or now - self._logged_failure >= LOG_AGAIN_SECONDS:
            self._logged_failure = now
            logger.warning("%s the lease %s: %s", what, self._place, described(error))


LAST_LABEL_SECONDS = 3.0


class ActiveLabel:
    """The label on a pod by which the Service selects the active operator. place: the Lease, in the pods' namespace.
    me: this operator's pod.
    """

    def __init__(self, api: KubeApi, place: LeaseName, me: str) -> None:
        self._api, self._namespace, self._me = api, place.namespace, me
        self._attempts = ApiAttempts((place.namespace, me))
        self._set = False

    async def take(self, others: Iterable[str]) -> None:
        """Label this pod and remove the label from `others`; retry until that is done or this operator has given up."""
        self._set = True
        for name in (*others, self._me):
            await self._attempts.until_done(f"label pod {name}", partial(self._label, name), ends=(404,))

    async def give_up(self, *, first: bool = False) -> None:
        """Remove this pod's label if this process may have set it, trying only once. first: also remove a label that
        an earlier process may have left.
        """
        if self._set or first:
            self._set = False
            try:
                async with asyncio.timeout(LAST_LABEL_SECONDS):
                    await self._api.label_pod(self._namespace, self._me, LABEL_ACTIVE, None)
            except (RemoteError, TimeoutError) as error:
                logger.warning("cannot remove the label %s from %s: %s", LABEL_ACTIVE, self._me, said_by(error))

    async def _label(self, name: str) -> None:
        """Set or remove a pod's label, unless this operator has given up."""
        if self._set:
            value = "true" if name == self._me else None
            await self._api.label_pod(self._namespace, name, LABEL_ACTIVE, value)
