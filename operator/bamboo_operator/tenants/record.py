"""Keeps in a ConfigMap what operators have to know of tenants: the shell of `spending` and of `claims`.

Each namespace has a key of its own, which the operator writes that looks after its jobs. So what is spent outlives
operators, and is known to all of them where jobs are divided into shards. It is written once a minute; what an operator
has not written the next one counts from the jobs' status. Claims are written at once, and read every few seconds as
long as there are some. Every write is of the very ConfigMap that was read last: of two, one is refused.
"""

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final, Protocol

from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.request_parts import Object
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.kube.objects import utc_now
from bamboo_operator.tenants.claims import Claims, SeenClaims, read_claims, written
from bamboo_operator.tenants.demand import JobDemand
from bamboo_operator.tenants.spending import JobMoney, Spending

logger = logging.getLogger(__name__)

TURN_SECONDS: Final = 1.0  # between two looks at whether there is anything to do
SOON_SECONDS: Final = 5.0  # between two looks at others' claims, and until what has failed is tried again
SYNC_SECONDS: Final = 60.0  # between two writes of what is spent, and two looks at what others have written
FORGOTTEN_AFTER: Final = timedelta(days=32)  # for which a namespace has had no job: its last month is over


class TenantRecordApi(Protocol):
    async def read_config_map(self, namespace: str, name: str) -> Object | None: ...

    async def create_config_map(self, config_map: Object) -> Object: ...

    async def patch_config_map(
        self, namespace: str, name: str, data: Mapping[str, str | None], version: str
    ) -> Object: ...


class TenantRecord:
    """Alone writes what the namespaces of this operator have spent, and the claims of their jobs. api, place: of the
    ConfigMap; without it all is forgotten when the operator ends. looks_after: is a namespace this operator's? clock:
    the time of day.
    """

    def __init__(
        self,
        api: TenantRecordApi | None = None,
        place: LeaseName | None = None,
        looks_after: Callable[[str], bool] = lambda _: True,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._api, self._place, self._looks_after, self.clock = api, place, looks_after, clock
        self._kept: Mapping[str, Spending] = {}  # of all namespaces, as it was read or written last
        self._own: dict[str, Spending] = {}  # as it is now
        self._new: set[str] = set()  # namespaces of this operator that are to be read before they are counted
        self._claims: Mapping[str, Claims] = {}  # of all namespaces, as they were read or written last
        self._version = ""  # of the ConfigMap that was read or written last; "" if there is none
        self._wanted: Mapping[str, Claims] = {}  # of namespaces of this operator, found from claims of that version:
        self._wanted_at = ""
        self._reach: dict[str, dict[str, int]] = {}  # pods of each job, by namespace, that have been claimed
        self._unsure: set[str] = set()  # namespaces of which a write of claims has failed
        self._due = 0.0  # time.monotonic() of the next sync
        self._retry = 0.0  # likewise, before which there is none
        self._since: datetime | None = clock() if api is None else None  # jobs made later cost nothing before
        self._said: str | None = None  # what went wrong last

    def counts(self, namespace: str) -> bool:
        """Is it known what jobs of that namespace have spent? Only of one that this operator looks after."""
        return namespace in self._own

    @property
    def current(self) -> Mapping[str, Spending]:
        """What each namespace has spent."""
        return {**self._kept, **self._own}

    def count(self, jobs: Iterable[JobMoney]) -> None:
        """Counts what jobs have cost until now. jobs: all of this operator."""
        if self._since is None:
            return
        now, found = self.clock(), defaultdict[str, list[JobMoney]](list)
        for job in jobs:
            found[job.namespace].append(job)
        own = {
            namespace: one
            for namespace, one in self._own.items()
            if self._looks_after(namespace) and (namespace in found or _is_news(one, self._kept.get(namespace)))
        }
        self._new = found.keys() - own.keys()
        self._reach = {name: one for name, one in self._reach.items() if self._looks_after(name)}
        if self._api is None:
            own |= {namespace: Spending(until=self._since) for namespace in self._new}
        self._own = {namespace: before.later(found[namespace], now) for namespace, before in own.items()}

    def seen_claims(self) -> SeenClaims:
        """What is known by now of all claims."""
        mine = frozenset(namespace for namespace, one in self._claims.items() if one and self._looks_after(namespace))
        return SeenClaims(
            version=self._version,
            others=tuple(job for name, one in self._claims.items() if name not in mine for job in one.values()),
            reach={name: pods for one in self._reach.values() for name, pods in one.items()},
            mine=mine,
            trouble=f"ConfigMap {self._place}" if self._said else "",
        )

    def claim(self, claims: Mapping[str, JobDemand], seen: SeenClaims) -> None:
        """That is to be claimed for jobs of this operator, and nothing for others of its namespaces. seen: what was
        seen before the jobs were asked what they want. What is new since then has to wait.
        """
        wanted = {name: dict[str, JobDemand]() for name in (seen.mine | self._own.keys()) - self._new}
        for name, job in claims.items():
            if job.namespace in wanted:
                wanted[job.namespace][name] = job
        self._wanted, self._wanted_at = wanted, seen.version

    async def run(self) -> None:
        """Until it is cancelled."""
        while self._api is not None and self._place is not None:
            now = time.monotonic()
            if now >= self._retry and (now >= self._due or self._new or self._claim_news()):
                await self.sync(self._api, self._place)
            await asyncio.sleep(TURN_SECONDS)

    async def sync(self, api: TenantRecordApi, place: LeaseName) -> None:
        """Writes what is new, and reads what others have written; what fails is tried again."""
        new, failed, done = frozenset(self._new), "", False
        try:
            done = await self._write(api, place)
        except API_ERRORS as error:
            failed = described(error)
        try:  # what cannot be written, such as what is too long, is known all the same
            await self._read(api, place, new)
        except API_ERRORS as error:
            failed = failed or described(error)
        now = time.monotonic()
        if failed:
            self._complain(f"cannot keep what tenants have spent, and may have, in {place}: {failed}")
            self._retry = now + SOON_SECONDS
            return
        self._said = None
        soon = new or not done or any(self._wanted.values())  # what is new is soon written, others' claims soon read
        self._due = now + (SOON_SECONDS if soon else SYNC_SECONDS)

    def _claim_news(self) -> dict[str, Claims]:
        """The claims that are to be written, by namespace. What was written by the operator before, or may not have
        been, is written anew: only a claim that an operator has written itself lets its jobs have more.
        """
        return {
            namespace: wanted
            for namespace, wanted in self._wanted.items()
            if self._looks_after(namespace)
            and (
                wanted != self._claims.get(namespace, {})
                or namespace in self._unsure
                or (wanted and namespace not in self._reach)
            )
        }

    async def _write(self, api: TenantRecordApi, place: LeaseName) -> bool:
        """False if somebody else was first."""
        claims = self._claim_news()
        claims = {name: one for name, one in claims.items() if name in self._own or name in self._kept}
        new = {
            namespace: one
            for namespace, one in {**self._kept, **self._own}.items()
            if self._looks_after(namespace)
            and (namespace in claims or (namespace in self._own and _is_news(one, self._kept.get(namespace))))
        }
        latest = self.clock() - FORGOTTEN_AFTER
        old = {
            namespace
            for namespace, one in self._kept.items()
            if one.until < latest and namespace not in self._own and self._looks_after(namespace)
        }
        if not new and not old:
            return True
        after = {namespace: claims.get(namespace, self._claims.get(namespace, {})) for namespace in new}
        data = {namespace: _text(one, after[namespace]) for namespace, one in new.items()}
        self._lower(claims)
        version = self._wanted_at if claims else self._version
        if (found := await _written(api, place, {**data, **dict.fromkeys(old)}, version)) is None:
            return False
        self._version = found["metadata"].get("resourceVersion") or ""
        self._kept = {namespace: one for namespace, one in {**self._kept, **new}.items() if namespace not in old}
        self._claims = {namespace: one for namespace, one in {**self._claims, **after}.items() if namespace not in old}
        self._reach |= {namespace: _pods(one) for namespace, one in claims.items()}
        self._unsure -= claims.keys()
        return True

    def _lower(self, claims: Mapping[str, Claims]) -> None:
        """Jobs may have no more than is claimed in any case, whether these claims will be written or not."""
        self._unsure |= claims.keys()
        for namespace, one in claims.items():
            pods, before = _pods(one), self._reach.get(namespace, {})
            self._reach[namespace] = {name: min(reach, pods.get(name, 0)) for name, reach in before.items()}

    async def _read(self, api: TenantRecordApi, place: LeaseName, new: Collection[str]) -> None:
        found = await api.read_config_map(place.namespace, place.name) or {}
        kept, claims = dict[str, Spending](), dict[str, Claims]()
        for namespace, text in (found.get("data") or {}).items():
            try:
                kept[namespace] = Spending.read(text)
                claims[namespace] = read_claims(namespace, json.loads(text).get("claims") or {})
            except ValueError as error:
                self._complain(f"what namespace {namespace} has spent begins anew: its key of {place} is {error}")
        self._version = (found.get("metadata") or {}).get("resourceVersion") or ""
        self._kept, self._claims, self._since = kept, claims, self._since or self.clock()
        for namespace in new:
            self._own.setdefault(namespace, kept.get(namespace) or Spending(until=self._since))
        for namespace, reach in self._reach.items():
            pods = _pods(claims.get(namespace, {}))
            self._reach[namespace] = {name: min(most, pods.get(name, 0)) for name, most in reach.items()}

    def _complain(self, said: str) -> None:
        """Once for each new trouble."""
        if said != self._said:
            logger.warning("%s", said)
        self._said = said


async def _written(
    api: TenantRecordApi, place: LeaseName, data: Mapping[str, str | None], version: str
) -> Object | None:
    """The ConfigMap with these keys; None if it is no longer of that version. version: "" if there is to be none."""
    metadata = {"namespace": place.namespace, "name": place.name}
    try:
        if version:
            return await api.patch_config_map(place.namespace, place.name, data, version)
        return await api.create_config_map(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        return None


def _text(spending: Spending, claims: Claims) -> str:
    """What is kept of a namespace."""
    return spending.written(claims=written(claims)) if claims else spending.written()


def _pods(claims: Claims) -> dict[str, int]:
    return {name: job.pods for name, job in claims.items()}


def _is_news(now: Spending, kept: Spending | None) -> bool:
    return kept is None or now.told != kept.told
