"""Keeps what namespaces have spent in a ConfigMap: the shell of `spending`.

Each namespace has a key of its own, which the operator writes that looks after its jobs. So what is spent outlives
operators, and is known to all of them where jobs are divided into shards. Changes are written once a minute; what an
operator has not written the next one counts from the jobs' status.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Final, Protocol

from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.request_parts import Object
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.kube.objects import utc_now
from bamboo_operator.tenants.spending import JobMoney, Spending

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0  # between two looks at whether there is anything to do
SYNC_SECONDS: Final = 60.0  # between two writes, and two looks at what others have written
FORGOTTEN_AFTER: Final = timedelta(days=32)  # for which a namespace has had no job: its last month is over


class SpendingApi(Protocol):
    async def read_config_map(self, namespace: str, name: str) -> Object | None: ...

    async def create_config_map(self, config_map: Object) -> Object: ...

    async def patch_config_map(self, namespace: str, name: str, data: Mapping[str, str | None]) -> Object: ...


class SpendingRecord:
    """Alone writes what the namespaces of this operator have spent. api, place: of the ConfigMap; without it all is
    forgotten when the operator ends. looks_after: is a namespace this operator's? clock: the time of day.
    """

    def __init__(
        self,
        api: SpendingApi | None = None,
        place: LeaseName | None = None,
        looks_after: Callable[[str], bool] = lambda _: True,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._api, self._place, self._looks_after, self.clock = api, place, looks_after, clock
        self._kept: Mapping[str, Spending] = {}  # of all namespaces, as it was read or written last
        self._own: dict[str, Spending] = {}  # as it is now
        self._new: set[str] = set()  # namespaces of this operator that are to be read before they are counted
        self._due = 0.0  # time.monotonic() of the next sync
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
        if self._api is None:
            own |= {namespace: Spending(until=self._since) for namespace in self._new}
        self._own = {namespace: before.later(found[namespace], now) for namespace, before in own.items()}

    async def run(self) -> None:
        """Until it is cancelled."""
        while self._api is not None and self._place is not None:
            if self._new or time.monotonic() >= self._due:
                await self.sync(self._api, self._place)
            await asyncio.sleep(LOOK_SECONDS)

    async def sync(self, api: SpendingApi, place: LeaseName) -> None:
        """Writes what is new, and reads what others have written; what fails is tried again."""
        new, failed = frozenset(self._new), ""
        for part in (partial(self._write, api, place), partial(self._read, api, place, new)):
            try:
                await part()  # what cannot be written, such as what is too long, is known all the same
            except API_ERRORS as error:
                failed = failed or described(error)
        if failed:
            self._complain(f"cannot keep what tenants have spent in {place}: {failed}")
            return
        self._said = None
        self._due = time.monotonic() + (LOOK_SECONDS if new else SYNC_SECONDS)  # what is new is soon written

    async def _write(self, api: SpendingApi, place: LeaseName) -> None:
        new = {
            namespace: one
            for namespace, one in self._own.items()
            if self._looks_after(namespace) and _is_news(one, self._kept.get(namespace))
        }
        latest = self.clock() - FORGOTTEN_AFTER
        old = {
            namespace
            for namespace, one in self._kept.items()
            if one.until < latest and namespace not in self._own and self._looks_after(namespace)
        }
        if not new and not old:
            return
        data = {namespace: one.written for namespace, one in new.items()}
        try:
            await api.patch_config_map(place.namespace, place.name, {**data, **dict.fromkeys(old)})
        except ApiError as error:
            if error.status != 404:
                raise
            metadata = {"namespace": place.namespace, "name": place.name}
            await api.create_config_map({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
        self._kept = {namespace: one for namespace, one in {**self._kept, **new}.items() if namespace not in old}

    async def _read(self, api: SpendingApi, place: LeaseName, new: Collection[str]) -> None:
        found = await api.read_config_map(place.namespace, place.name)
        kept: dict[str, Spending] = {}
        for namespace, text in ((found or {}).get("data") or {}).items():
            try:
                kept[namespace] = Spending.read(text)
            except ValueError as error:
                self._complain(f"what namespace {namespace} has spent begins anew: its key of {place} is {error}")
        self._kept, self._since = kept, self._since or self.clock()
        for namespace in new:
            self._own.setdefault(namespace, kept.get(namespace) or Spending(until=self._since))

    def _complain(self, said: str) -> None:
        """Once for each new trouble."""
        if said != self._said:
            logger.warning("%s", said)
        self._said = said


def _is_news(now: Spending, kept: Spending | None) -> bool:
    return kept is None or now.told != kept.told
