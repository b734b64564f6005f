"""Keeps the record of nodes in a ConfigMap: the shell of `node_record`.

A ConfigMap, since it needs nothing else of a cluster, outlives the operator and its jobs, and can be read with kubectl.
Changes are written at most once in WRITE_SECONDS, so that what happened in the last minute before a crash is missing.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from bamboo_core import names
from bamboo_core.job.placement_spec import Capacity, pool_price
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.request_parts import Object
from bamboo_core.planning.hazards import Exposure, Place, exposures
from bamboo_core.traces.trace import NodeTraceError
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.lease import LeaseName
from bamboo_operator.kube.objects import JobKey, utc_now, zone_of
from bamboo_operator.manifests.worker_pod import worker_pool
from bamboo_operator.prices.pool_prices import priced_pools, worker_price
from bamboo_operator.prices.source import PriceSource
from bamboo_operator.recording.node_record import (
    NodeRecord,
    SeenNode,
    Trouble,
    bounded,
    observed,
    restored,
    stored,
    troubles_of,
)
from bamboo_operator.signals.node_marks import NodeMark

logger = logging.getLogger(__name__)

OBSERVE_SECONDS = 5.0
SETTLED_LOOKS = 3  # at the beginning, with as many nodes each time: then all have been listed
WRITE_SECONDS = 60.0
UNCHANGED_SECONDS = 900.0  # after which it is written all the same, because it says until when was watched


READ_SECONDS = 300.0  # until one who does not record reads what is recorded
UNREADABLE = (NodeTraceError, binascii.Error, KeyError, ValueError)


class ConfigMapReader(Protocol):
    async def read_config_map(self, namespace: str, name: str) -> Object | None: ...


class ConfigMapApi(ConfigMapReader, Protocol):
    async def create_config_map(self, config_map: Object) -> Object: ...

    async def replace_config_map(self, config_map: Object) -> Object: ...


class NodeRecorder:
    """What records nodes in a ConfigMap. spec: of a job that is known. place: of the ConfigMap. clock: the time
    of day.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        api: ConfigMapApi,
        place: LeaseName,
        spec: Callable[[JobKey], JobSpec | None],
        marks: Sequence[NodeMark] = (),
        clock: Callable[[], datetime] = utc_now,
        prices: PriceSource | None = None,
    ) -> None:
        self._cluster, self._api, self._place = cluster, api, place
        self._spec, self._marks, self._clock = spec, marks, clock
        self._prices = prices or PriceSource()
        self._record: NodeRecord | None = None
        self._kept: Object | None = None  # the ConfigMap as it was last read or written
        self._troubles: dict[str, Trouble] = {}
        self._seen_before: Mapping[str, SeenNode] = {}
        self._looks, self._count = 0, -1  # with as many nodes
        self._changed, self._written = False, 0.0
        self._said: str | None = None  # what went wrong last
        self._exposures: tuple[float, Mapping[Place, Exposure]] | None = None  # and when they were counted

    async def run(self) -> None:
        """Records nodes until it is cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(OBSERVE_SECONDS)

    async def turn(self) -> None:
        """Look once, and write if it is time."""
        now = self._clock().timestamp()
        if self._record is None:
            await self._attempt(self._load, "read")
        if self._record is None or not self._has_settled():
            return
        self._look(self._record)
        since = now - self._written
        if since >= (WRITE_SECONDS if self._changed else UNCHANGED_SECONDS):
            await self._attempt(self._write, "write")

    async def end(self) -> None:
        """What has not been written yet."""
        if self._record is not None and self._changed:
            await self._attempt(self._write, "write")

    def _has_settled(self) -> bool:
        """Whether all nodes have been listed; until then those that are missing would count as gone."""
        if self._looks < SETTLED_LOOKS:
            count = len(self._cluster.nodes)
            self._looks = self._looks + 1 if count and count == self._count else 0
            self._count = count
        return self._looks >= SETTLED_LOOKS

    def _look(self, record: NodeRecord) -> None:
        now, nodes = self._clock(), self._cluster.nodes
        used = {name for name in nodes if self._worker_on(name) is not None}
        self._troubles = troubles_of(self._troubles, nodes, self._marks, now, used)
        seen = {name: self._seen(name, node) for name, node in nodes.items() if self._is_ours(record, name)}
        after = bounded(observed(record, seen, self._troubles, now.timestamp(), self._seen_before))
        self._seen_before = seen
        self._troubles = {name: trouble for name, trouble in self._troubles.items() if name in nodes}
        self._changed = self._changed or after.trace != record.trace
        self._record = after

    def _is_ours(self, record: NodeRecord, name: str) -> bool:
        return name in record.there or self._worker_on(name) is not None

    def _worker_on(self, node: str) -> tuple[JobKey, Object] | None:
        """The job and the pod of a worker on that node, if there is one that is not of a pool on demand."""
        for job, pod in self._cluster.workers_on(node):
            labels = pod["metadata"].get("labels") or {}
            if labels.get(names.LABEL_CAPACITY_TYPE) != Capacity.ON_DEMAND.value:
                return job, pod
        return None

    def _seen(self, name: str, node: Mapping[str, Any]) -> SeenNode:
        metadata = node["metadata"]
        zone = zone_of(node)
        found = self._worker_on(name)
        if found is None:
            return SeenNode(uid=metadata["uid"], zone=zone, used=False)
        job, pod = found
        spec, pool = self._spec(job), worker_pool(pod) or ""
        if spec is None:
            return SeenNode(uid=metadata["uid"], zone=zone, pool=pool)
        pools, node_price = spec.node_pools, spec.spread.node_price
        prices = self._prices.current
        found_pool = next((one for one in pools if one.name == pool), None)
        price = node_price(worker_price(found_pool, spec, prices, zone) if found_pool is not None else None)
        dear = node_price(pool_price(priced_pools(spec, prices, {}), Capacity.ON_DEMAND))
        return SeenNode(
            uid=metadata["uid"], zone=zone, pool=pool, price=price, on_demand=None if price is None else dear
        )

    def exposures(self) -> Mapping[Place, Exposure]:
        """What is recorded of each pool in each zone, until about now."""
        record, now = self._record, self._clock().timestamp()
        if record is None:
            return {}
        if self._exposures is None or now - self._exposures[0] >= WRITE_SECONDS:
            self._exposures = now, exposures(record.trace, now - record.began)
        return self._exposures[1]

    # the ConfigMap

    async def _load(self) -> None:
        began = self._clock().timestamp()
        self._kept = await self._api.read_config_map(self._place.namespace, self._place.name)
        record = NodeRecord(began=began)
        if self._kept is not None and (text := (self._kept.get("binaryData") or {}).get(names.NODE_RECORD_KEY)):
            try:
                record = _record_in(self._kept, text)
            except UNREADABLE as error:
                logger.warning("the record of nodes in %s cannot be read, and begins anew: %s", self._place, error)
        self._record, self._written = record, began

    async def _write(self) -> None:
        assert self._record is not None
        now = self._clock()
        source = f"recorded by the operator until {now:%Y-%m-%d %H:%M} UTC"
        record, data = await asyncio.to_thread(stored, self._record, now.timestamp(), source)
        wanted = self._config_map(record, data)
        if self._kept is None:
            self._kept = await self._api.create_config_map(wanted)
        else:
            self._kept = await self._api.replace_config_map(wanted)
        self._record, self._changed, self._written = record, False, now.timestamp()

    def _config_map(self, record: NodeRecord, data: bytes) -> Object:
        kept: Object = self._kept or {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}}
        metadata = kept["metadata"]
        return {
            **kept,
            "metadata": {
                **metadata,
                "namespace": self._place.namespace,
                "name": self._place.name,
                "labels": {**(metadata.get("labels") or {}), names.LABEL_NODE_RECORD: "true"},
                "annotations": {**(metadata.get("annotations") or {}), names.NODE_RECORD_BEGAN: f"{record.began:.1f}"},
            },
            "binaryData": {names.NODE_RECORD_KEY: base64.b64encode(data).decode()},
        }

    async def _attempt(self, work: Callable[[], Any], what: str) -> None:
        """A record is no reason to do anything less: what goes wrong is said once, and tried again."""
        try:
            await work()
        except API_ERRORS as error:
            said = f"cannot {what} the record of nodes in {self._place}: {described(error)}"
            if said != self._said:
                logger.warning("%s", said)
            self._said = said
            self._written = self._clock().timestamp()
            if isinstance(error, ApiError) and error.status in (404, 409) and what == "write":
                self._kept = await self._reread()
        else:
            self._said = None

    async def _reread(self) -> Object | None:
        """Somebody has changed or deleted it: what is known here counts."""
        try:
            return await self._api.read_config_map(self._place.namespace, self._place.name)
        except API_ERRORS as error:
            logger.warning("cannot read the record of nodes in %s: %s", self._place, described(error))
            return self._kept


def _record_in(config_map: Object, text: str) -> NodeRecord:
    """The record in a ConfigMap. Raises what is in UNREADABLE."""
    notes = config_map["metadata"].get("annotations") or {}
    return restored(base64.b64decode(text, validate=True), float(notes[names.NODE_RECORD_BEGAN]))
