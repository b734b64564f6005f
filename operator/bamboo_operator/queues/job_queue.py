"""Brings one job's Workloads to what is decided about them: the only writer of these, beside Kueue itself."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.request_parts import Object
from bamboo_core.names import LABEL_POD_SET
from bamboo_operator.cluster.workload_cache import WorkloadCache
from bamboo_operator.kube.client import ApiClient
from bamboo_operator.kube.objects import JobIdentity, api_time, utc_now
from bamboo_operator.manifests.worker_pod import JobMeta, WorkerPodSettings
from bamboo_operator.manifests.workload import (
    ELASTIC,
    INSTEAD_OF,
    POOLS,
    REPLACES,
    SHAPE,
    SLICE_NAME,
    STANDBY,
    Priority,
    SeatKind,
    asked_kinds,
    kind_after,
    pod_sets,
    pool_names,
    priority_class,
    rooms_of,
    seat_kinds,
    shape,
    spread_seats,
    workload,
)
from bamboo_operator.queues.decision import (
    FREE,
    Action,
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    GiveUpSeats,
    JobNow,
    QueueEnding,
    QueueStanding,
    QueueWish,
    ReleaseQuota,
    ResizeWorkload,
    TellReady,
    decide,
)
from bamboo_operator.queues.flavors import FlavorNodes, in_domain, next_pod_set, nodes_of, placed, pools_on
from bamboo_operator.queues.seats import fitted, seat_bounds
from bamboo_operator.queues.seen_workload import PREEMPTED, SeenWorkload, read_workload
from bamboo_operator.queues.topology import is_elsewhere, next_domain

logger = logging.getLogger(__name__)

MOST_ACTIONS: Final = 10  # one after the other, before others get their turn
LEAVE_SECONDS: Final = 180.0  # for workers to go that are given back: the step ends before, and two more
AGAIN_SECONDS: Final = 30.0  # until a class that is missing is looked for again
NOT_FOLLOWED: Final = (
    "spec.queue: not followed, for the cluster serves no Workloads of kueue.x-k8s.io in v1beta2 or newer, or the"
    " operator may not list them, or is told to use none (--no-kueue)"
)
Condition = tuple[str, bool, str, str]  # type, whether it holds, reason, message


class JobQueue:
    """One job's place in its queue. standing: what it may do. due: when there may be something to do though nothing has
    happened (time.monotonic()). warning: why its queue is not followed, if that is so.
    """

    def __init__(
        self, job: JobIdentity, workloads: WorkloadCache, api: ApiClient, settings: WorkerPodSettings, *, slices: bool
    ) -> None:
        self._job, self._workloads, self._api, self._settings = job, workloads, api, settings
        self._meta = JobMeta(uid=job.uid)
        self._slices = slices
        self._since: dict[str, tuple[object, float]] = {}  # by name: what a Workload is like, and since when
        self._nodes: dict[str, FlavorNodes] = {}  # by pod set
        self._flavors: Mapping[str, frozenset[str]] = {}  # of which these are
        self._kinds: Sequence[SeatKind] = ()  # of its workers, that are asked for
        self._begins = True  # then another operator may have asked
        self._seatless_since: float | None = None  # since when it is in a queue without quota; time.monotonic()
        self._standby = 0  # seats for spare workers
        self.standing, self.due, self.warning = FREE, math.inf, ""

    async def reconcile(
        self, spec: JobSpec, now: JobNow, *, stopped: bool = False, ended: QueueEnding | None = None
    ) -> None:
        """stopped: the job is suspended for another reason. Raises what is in API_ERRORS."""
        version = self._workloads.version
        if version is None:
            self.standing, self.due, self.warning = FREE, math.inf, NOT_FOLLOWED if spec.queue else ""
            return
        self.warning, self._standby = "", spec.standby.workers
        falls, wanted = math.inf, ""
        kinds = () if spec.queue is None else seat_kinds(spec, self._meta, self._settings)
        shapes = {number: shape(spec, asked_kinds(kinds, number)) for number in range(len(kinds))}
        for _ in range(MOST_ACTIONS):
            seen = self._seen()
            if kinds:
                waits = not (stopped or ended or any(one.reserved and not one.finished for one in seen))
                first, falls = self._first_kind(kinds, shapes, seen, waits=waits)
                self._kinds, self._begins, wanted = asked_kinds(kinds, first), False, shapes[first]
            wish = QueueWish(
                queue=spec.queue.name if spec.queue else None,
                bounds=seat_bounds(spec),
                shape=wanted,
                slices=self._has_slices(spec),
                leave_seconds=LEAVE_SECONDS,
                stopped=stopped,
                ended=ended,
            )
            found = decide(wish, seen, now, self._waited(seen))
            self.standing, self.due = found.standing, time.monotonic() + min(found.due, falls)
            if found.action is None or not await self._act(found.action, spec, version, seen):
                break
        await self._read_flavors(version)

    def fitted(self, spec: JobSpec) -> JobSpec:
        """The job with as many workers as it has seats for."""
        if not self.standing.seats:
            return spec
        standby = replace(spec.standby, workers=min(spec.standby.workers, self._spare))
        return replace(fitted(spec, self.standing.seats), standby=standby)

    @property
    def knows_nodes(self) -> bool:
        """Is it known on which nodes the seats are?"""
        return self.standing.flavors == self._flavors

    def has_seat(self, living: int) -> bool:
        """Is there a seat for one more of so many pods, spare ones included?"""
        return self.standing.seats is None or living < self.standing.seats + self._spare

    @property
    def _spare(self) -> int:
        """Seats for spare workers; while others are asked for as many as there are."""
        return min(self._standby, self.standing.spare) if self.standing.outgrown else self._standby

    def pools(self, spec: JobSpec, staying: Mapping[str, Object]) -> Sequence[NodePool]:
        """The pools in which the next pod may be. staying: the job's pods but those that leave."""
        pod_set = self._next_set(staying)
        return pools_on(spec, self._asked_pools(spec, pod_set), self._nodes.get(pod_set, FlavorNodes()))

    def placed(self, pod: Object, staying: Mapping[str, Object]) -> Object:
        """The next pod as its seat asks for."""
        if self.standing.seats is None:
            return pod
        pod_set = self._next_set(staying)
        made = placed(pod, pod_set, self._nodes.get(pod_set, FlavorNodes()))
        if not (domains := self.standing.domains.get(pod_set)):
            return made
        return in_domain(made, next_domain(domains, pod_set, staying.values()), self.standing.workload)

    def moved(self, pods: Mapping[str, Object]) -> list[str]:
        """Those of these pods whose seats are in other domains by now."""
        found = []
        for name, pod in pods.items():
            pod_set = (pod["metadata"].get("labels") or {}).get(LABEL_POD_SET, "")
            if is_elsewhere(self.standing.domains.get(pod_set, ()), pod):
                found.append(name)
        return found

    def _asked_pools(self, spec: JobSpec, pod_set: str) -> Sequence[NodePool]:
        """The pools for which that pod set was asked for; spare workers are as those of the first one."""
        sets = list(self.standing.sets)
        number = sets.index(pod_set) if pod_set in sets else 0
        if self.standing.outgrown:  # then what is asked for now says nothing of these seats
            names = self.standing.pools.get(sets[number], frozenset())
            return [pool for pool in spec.node_pools if pool.name in names] or spec.node_pools
        has_kind = self.standing.seats is not None and number < len(self._kinds)
        return self._kinds[number].pools if has_kind else spec.node_pools

    def _next_set(self, staying: Mapping[str, Object]) -> str:
        return next_pod_set(self.standing.sets, STANDBY in self.standing.flavors, staying.values())

    def _first_kind(
        self, kinds: Sequence[SeatKind], shapes: Mapping[int, str], seen: Sequence[SeenWorkload], *, waits: bool
    ) -> tuple[int, float]:
        """The first kind of workers that is asked for, that whose seats the job has; and in how many seconds it may be
        another one. shapes: what is asked for with each as the first. waits: it has none, and is to have some.
        """
        now = time.monotonic()
        if not waits:
            self._seatless_since = None
            return _held_kind(kinds, shapes, [one for one in seen if one.reserved]), math.inf
        if self._seatless_since is None:
            before = _first_of(shapes, seen if self._begins else ()) or 0
            self._seatless_since = now - (kinds[before].pools[0].after_seconds if before else 0.0)
        return kind_after(kinds, now - self._seatless_since)

    def _seen(self) -> list[SeenWorkload]:
        return [read_workload(one) for one in self._workloads.of(*self._job)]

    def _waited(self, seen: Sequence[SeenWorkload]) -> dict[str, float]:
        now, before = time.monotonic(), self._since
        self._since = {}
        for one in seen:
            like = (one.uid, one.asked, one.held, one.admitted, one.evicted, "QuotaReserved" in one.conditions)
            known = before.get(one.name)
            self._since[one.name] = known if known is not None and known[0] == like else (like, now)
        return {name: now - since for name, (_, since) in self._since.items()}

    async def _read_flavors(self, version: str) -> None:
        """Reads what the flavors of the seats say, once for each admission."""
        if self.knows_nodes:
            return
        nodes = {}
        for pod_set, names in self.standing.flavors.items():
            found = [await self._api.find_resource_flavor(version, name) for name in sorted(names)]
            nodes[pod_set] = nodes_of(one for one in found if one is not None)
        self._flavors, self._nodes = self.standing.flavors, nodes

    # what is done

    async def _act(self, action: Action, spec: JobSpec, version: str, seen: Sequence[SeenWorkload]) -> bool:
        """Whether there may be more to do now. What others have changed meanwhile is read, and decided upon anew."""
        if isinstance(action, CreateWorkload):
            return await self._create(action, spec, version, seen)
        logger.info("%s/%s: %s", *self._job.key, _told(action))
        thing = next(one for one in self._workloads.of(*self._job) if one["metadata"]["name"] == action.workload.name)
        key = (thing["metadata"]["namespace"], thing["metadata"]["name"])
        try:
            if isinstance(action, DeleteWorkload):
                await self._api.delete_workload(thing)
                self._workloads.forget(key, action.workload.uid)
            else:
                part, changes = _changes(action, thing, utc_now(), rooms_of(self._kinds, self._standby))
                self._workloads.put(await self._api.change_workload(thing, part, changes))
        except ApiError as error:
            if error.status in (404, 409):
                await self._reread(thing)
            elif isinstance(action, ResizeWorkload) and action.workload.reserved and error.status in (400, 403, 422):
                logger.warning("%s/%s: Kueue has no slices for it: %s", *self._job.key, error)
                self._slices = False
            else:
                raise
        return True

    async def _reread(self, thing: Object) -> None:
        found = await self._api.read_workload(thing)
        if found is None:
            self._workloads.forget((thing["metadata"]["namespace"], thing["metadata"]["name"]))
        else:
            self._workloads.put(found)

    async def _create(self, action: CreateWorkload, spec: JobSpec, version: str, seen: Sequence[SeenWorkload]) -> bool:
        priority = await self._priority(spec, version)
        if isinstance(priority, QueueStanding):
            self.standing = priority if self.standing.holds else self.standing
            self.due = time.monotonic() + AGAIN_SECONDS
            return False
        logger.info("%s/%s: %s", *self._job.key, _told(action))
        annotations = {SHAPE: shape(spec, self._kinds)}
        if spec.node_pools:
            annotations[POOLS] = pool_names(self._kinds)
        if self._has_slices(spec):
            annotations[ELASTIC] = "true"
        sets = pod_sets(self._kinds, action.seats, least=action.least, standby=spec.standby.workers)
        if action.replaces is not None:
            of_job, name = self._workloads.of(*self._job), action.replaces.name
            before = next((one for one in of_job if one["metadata"]["name"] == name), None)
            if before is None:  # it has gone while the priority was read
                return True
            annotations |= self._succession(before, sets, slices=self._has_slices(spec))
        number = 1 + max((one.number for one in seen), default=0)
        thing = workload(spec, self._meta, version, number, sets, priority, annotations)
        try:
            self._workloads.put(await self._api.create_workload(thing))
        except ApiError as error:
            if error.status != 409:
                raise
            await self._reread(thing)
        return True

    def _has_slices(self, spec: JobSpec) -> bool:
        """Kueue knows no slices whose topology is chosen."""
        return self._slices and not (spec.queue is not None and spec.queue.topology)

    def _succession(self, before: Object, sets: Sequence[Mapping[str, Any]], *, slices: bool) -> dict[str, str]:
        """The annotations of one that is to be admitted in place of another: as a slice, if it can be; else both hold
        quota until the first is finished.
        """
        namespace, name = self._job.key[0], str(before["metadata"]["name"])
        if not slices or _flavored(before["spec"]["podSets"]) != _flavored(sets):
            return {INSTEAD_OF: name}
        first = (before["metadata"].get("annotations") or {}).get(SLICE_NAME) or name
        return {REPLACES: f"{namespace}/{name}", SLICE_NAME: first}

    async def _priority(self, spec: JobSpec, version: str) -> Priority | QueueStanding | None:
        """The job's priority, None if nothing says it; or that its class is missing."""
        named = priority_class(spec)
        if named is None:
            return None
        group, kind, name = named
        of_kueue = kind == "WorkloadPriorityClass"
        found = await self._api.find_priority_class(group, version if of_kueue else "v1", kind, name)
        if found is None:
            field = "spec.queue.priorityClass" if of_kueue else "spec.worker.template.spec.priorityClassName"
            message = f"{field}: expected the name of a {kind}, and there is no {name}"
            return QueueStanding(seats=0, reason="NoPriorityClass", message=message)
        return Priority(group=group, kind=kind, name=name, value=int(found.get("value") or 0))


def _first_of(shapes: Mapping[int, str], seen: Sequence[SeenWorkload]) -> int | None:
    """With which kind as the first one of these is asked for; None if with none."""
    asked = {one.shape for one in seen}
    return next((number for number, one in shapes.items() if one in asked), None)


def _held_kind(kinds: Sequence[SeatKind], shapes: Mapping[int, str], holders: Sequence[SeenWorkload]) -> int:
    """The first kind of those whose seats a job has, also where its pods ask for something else now. shapes: what is
    asked for with each as the first.
    """
    if (found := _first_of(shapes, holders)) is not None:
        return found
    names = {name for one in holders for name in next(iter(one.pools.values()), ())}
    return next((number for number, kind in enumerate(kinds) if any(pool.name in names for pool in kind.pools)), 0)


def _told(action: Action) -> str:
    match action:
        case CreateWorkload(seats=seats, replaces=replaces):
            return f"asks its queue for {seats} workers" + (f", in place of {replaces.name}" if replaces else "")
        case ResizeWorkload(workload=one, seats=seats):
            return f"{one.name} asks for {seats} workers"
        case GiveUpSeats(workload=one, seats=seats):
            return f"{seats} workers of {one.name} are not needed any more"
        case ReleaseQuota(workload=one):
            return f"the quota of {one.name} is given back"
        case TellReady(workload=one, ready=ready):
            return f"the workers of {one.name} {'train' if ready else 'do not train'}"
        case FinishWorkload(workload=one, reason=reason):
            return f"{one.name} is over: {reason}"
        case DeleteWorkload(workload=one):
            return f"{one.name} is deleted"


def _changes(action: Action, thing: Object, now: datetime, rooms: Sequence[int]) -> tuple[str, Object]:
    """Which part of a Workload is changed, and how. rooms: for how many workers each of its pod sets may be."""
    match action:
        case ResizeWorkload(workload=one, seats=seats):
            counts = one.spread(seats)
            if seats > one.asked and len(rooms) == len(counts):
                counts = dict(zip(counts, spread_seats(seats, rooms), strict=True))
            return "spec", {"podSets": [_resized(pods, counts) for pods in thing["spec"]["podSets"]]}
        case GiveUpSeats(workload=one, seats=seats):
            kept = one.spread(one.asked - seats)
            less = [{"name": name, "count": asked - kept[name]} for name, asked in one.sets.items()]
            return "status", {"reclaimablePods": [pods for pods in less if pods["count"]]}
        case ReleaseQuota(workload=one):
            why = one.conditions["Evicted"]
            again = why.reason in (PREEMPTED, "NodeFailures")
            found = (
                ("QuotaReserved", False, "Pending", why.message),
                ("Admitted", False, "NoReservation", "the Workload has no reservation"),
                ("Requeued", again, why.reason, why.message),
            )
            return "status", {"conditions": _with(thing, now, *found), "admission": None, "reclaimablePods": None}
        case TellReady(workload=one, ready=ready):
            return "status", {"conditions": _with(thing, now, _readiness(one, ready))}
        case FinishWorkload(reason=reason, message=message):
            return "status", {"conditions": _with(thing, now, ("Finished", True, reason, message))}
        case _:
            raise AssertionError(f"changes no Workload: {action}")


def _flavored(sets: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What slices of a job must have in common, for Kueue leaves them in the flavors of the first one: pod sets, names
    of resources, and what is said of nodes.
    """
    found: list[Any] = []
    for one in sets:
        spec = one["template"]["spec"]
        holders = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()), spec)
        asked = [
            (holder.get("resources") or {}).get(part) or {} for holder in holders for part in ("requests", "limits")
        ]
        where = [spec.get(key) or None for key in ("nodeSelector", "tolerations", "affinity")]
        found.append((one["name"], {name for amounts in asked for name in amounts}, where))
    return found


def _resized(pods: Mapping[str, Any], counts: Mapping[str, int]) -> Object:
    count = counts.get(pods["name"], pods["count"])
    least = {"minCount": min(count, pods["minCount"])} if count and "minCount" in pods else {}
    return {**{key: value for key, value in pods.items() if key != "minCount"}, "count": count, **least}


def _readiness(one: SeenWorkload, ready: bool) -> Condition:
    """The condition PodsReady. What trains is ready also with a worker less: whether it goes on is not for a queue."""
    before = one.conditions.get("PodsReady")
    again = before is not None and before.reason in ("WaitForRecovery", "Recovered")
    if ready:
        return "PodsReady", True, "Recovered" if again else "Started", "the job trains"
    begun = again or (before is not None and before.holds)
    return "PodsReady", False, "WaitForRecovery" if begun else "WaitForStart", "the job does not train"


def _with(thing: Object, now: datetime, *changed: Condition) -> list[dict[str, Any]]:
    """The conditions of a Workload, with others in their places."""
    conditions = {one["type"]: dict(one) for one in (thing.get("status") or {}).get("conditions") or ()}
    for kind, holds, reason, message in changed:
        before, status = conditions.get(kind), "True" if holds else "False"
        since = before["lastTransitionTime"] if before and before["status"] == status else api_time(now)
        conditions[kind] = {
            "type": kind,
            "status": status,
            "reason": reason or "Unknown",
            "message": message or reason,
            "lastTransitionTime": since,
            "observedGeneration": thing["metadata"].get("generation", 0),
        }
    return list(conditions.values())
