"""Which operator may work: the one that holds a Lease of the API server.

A Deployment with one replica makes a second pod while the first one's process still lives, if the first one's kubelet
hangs, and workers would obey two coordinators. So nobody opens the workers' port without the Lease.

What cannot be excluded: a holder that cannot reach the API server goes on working, for its workers still need
somebody who takes over for them, and nobody else can decide better while they are connected to it. It ends when it
reads that the Lease has another holder. So does one whose pod was deleted by force while another operator waited; until
then, at most NOTICE_SECONDS, there are two.

By hand, because the official client's election (37.0.2) fails if there is no Lease yet, ends without a word to the work
when the API server is away, sees another holder only after 5 minutes if a renewal hangs, never releases, and looks at
no pod (measured at b11a1fe3).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from bamboo_core.job.text_patterns import DNS_LABEL, DNS_NAME
from bamboo_core.kube.api import KubeApi, Object
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_operator.kube.access import TIMEOUT_SECONDS
from bamboo_operator.kube.objects import utc_now
from bamboo_operator.kube.refusals import described

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
DURATION_SECONDS = 30  # without a renewal, until another may take it
POLL_SECONDS = 2.0  # between two looks of one that waits, or that could not renew
NOTICE_SECONDS = RENEW_SECONDS + TIMEOUT_SECONDS  # in which a holder notices that it is one no more
LOG_AGAIN_SECONDS = 60.0
LEASE_CONNECTIONS = 2
OVER = ("Failed", "Succeeded")  # a pod's phases
BEFORE = "bamboo.dev/holders-before"  # an annotation of the Lease


class LeaseLost(Exception):
    """Another operator holds the lease."""


@dataclass(frozen=True, slots=True)
class LeaseName:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "LeaseName":
        """Raises ValueError."""
        namespace, _, name = text.partition("/")
        if not (DNS_LABEL.fits(namespace) and DNS_NAME.fits(name)):
            raise ValueError(f'expected NAMESPACE/NAME, got "{text}"')
        return cls(namespace, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """What a Lease says. holder: "" for none; seconds: without a renewal, until another may take it.

    before: earlier holders that may not have noticed yet that they are none any more.
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
    """A record, and since when (in our monotonic seconds) it has been seen unchanged.

    Time in which the API server did not answer is left out.
    """

    record: LeaseRecord
    since: float

    def after(self, record: LeaseRecord, now: float) -> "ObservedLease":
        return ObservedLease(record, self.since if record == self.record else now)


class HolderPod(StrEnum):
    """What is known of the pod that has the holder's name."""

    LIVES = "Lives"
    LEAVES = "Leaves"  # it is being deleted; its processes may live all the same
    OVER = "Over"  # it is gone, or has ended
    UNKNOWN = "Unknown"  # also where the holder is no pod


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseDecision:
    """take: whether the lease may be taken now. notice: who may still work, and has to notice it first."""

    take: bool
    notice: tuple[str, ...] = ()
    message: str


def decide(observed: ObservedLease | None, me: str, now: float, pod: HolderPod) -> LeaseDecision:
    """observed: None if there is no Lease. pod: of a holder that is somebody else.

    No time of another machine is looked at: a holder's seconds begin when we first see its newest renewal.
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
    """The Lease with me as its holder: taken by me, or renewed. The rest of it stays."""
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


# The Lease itself


class Lease:
    """me: this operator's identity, the name of its pod. First acquire(), then keep() beside settle() and the work."""

    def __init__(
        self,
        api: KubeApi,
        place: LeaseName,
        me: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.waiting: str | None = None  # for what, while it does
        self.stands_by = False  # does another one hold it, as far as is known?
        self.predecessors: tuple[str, ...] = ()  # who may not have noticed that this one holds it now
        self._api, self._place, self._me = api, place, me
        self._clock, self._sleep = clock, sleep
        self._lease: Object | None = None  # as it was last read or written
        self._observed: ObservedLease | None = None
        self._looked, self._blind = 0.0, False  # when it was read last; has the API server not answered since?
        self._before: tuple[str, ...] = ()  # who has to notice first
        self._pods: set[str] = set()  # holders whose pods were seen
        self._logged_failure: float | None = None

    async def acquire(self) -> None:
        """Until it is ours. May be cancelled at any time; release() all the same."""
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
        """Until those who held it before have ended, or have had the time to notice that they hold it no more."""
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
        """Renews it for ever. Raises LeaseLost if it is another's.

        While the API server cannot be reached it tries again and again, and the operator goes on working: it still
        takes over for the workers that are connected to it, and nobody else can.
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
        """If it is ours, it is nobody's. May raise RemoteError."""
        lease = await self._read()
        if lease is not None and LeaseRecord.of(lease).holder == self._me:
            await self._api.replace_lease(released(lease))
            logger.info("the lease %s is released", self._place)

    async def _judge(self, lease: Object | None) -> LeaseDecision:
        """Whether it may be taken now. lease: as it was read just now, None if there is none."""
        self._lease = lease
        if lease is None:
            self._observed, self._before = None, ()
            return decide(None, self._me, self._clock(), HolderPod.UNKNOWN)
        record, now = LeaseRecord.of(lease), self._clock()
        if self._observed and self._blind:  # nor could the holder renew it
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
        """Makes it ours, or renews it, unless it is not what was last read any more."""
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

        An operator outside of the cluster has none, and lives all the same: only a pod that was seen can be gone.
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
        """Once in a while."""
        now = self._clock()
        if self._logged_failure is None or now - self._logged_failure >= LOG_AGAIN_SECONDS:
            self._logged_failure = now
            logger.warning("%s the lease %s: %s", what, self._place, described(error))
