"""An API server with Kueue's Workloads, its webhook and a stand-in for its manager; and jobs that take their seats."""

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.errors import ApiError
from bamboo_operator.cluster.workload_cache import WorkloadCache
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.manifests.worker_pod import JobMeta
from bamboo_operator.manifests.workload import workload_name
from bamboo_operator.queues.decision import JobNow, QueueEnding, QueueStanding
from bamboo_operator.queues.job_queue import JobQueue
from fake_api import FakeApi
from kueue_manager import Manager, refusal, usage
from operator_kit import SETTINGS
from opsim_server import merged

Json = dict[str, Any]
BEGAN = datetime(2026, 3, 1, tzinfo=UTC)


class QueueWorld:
    """seconds: that have passed. calls: what was asked of the API server."""

    def __init__(self, quota: int, *, slices: bool = True) -> None:
        self.manager = Manager(quota, slices=slices)
        self.cache, self.api = WorkloadCache("v1beta2"), FakeApi()
        self.flavors: dict[str, Json] = {"default": {"spec": {}}}
        self.classes: dict[str, int] = {}
        self.calls: list[str] = []
        self.seconds = 0.0

    @property
    def workloads(self) -> list[Json]:
        return list(self.api.all("workloads").values())

    @property
    def used(self) -> int:
        return self.manager.used(self.workloads)

    def pass_time(self, seconds: float) -> None:
        """Meanwhile Kueue does what it has to, and the watch tells of it."""
        self.seconds += seconds
        for changed in self.manager.step(self.workloads, self._now):
            self.api.put("workloads", changed)
        for one in self.workloads:
            self.cache.put(copy.deepcopy(one))

    @property
    def _now(self) -> datetime:
        return BEGAN + timedelta(seconds=self.seconds)

    def other(self, name: str, pods: int, priority: int) -> None:
        """A Workload that is not Bamboo's."""
        metadata = {"namespace": "default", "name": name, "uid": name, "creationTimestamp": self._now.isoformat()}
        spec = {"queueName": "q", "priority": priority, "podSets": [{"name": "main", "count": pods, "template": {}}]}
        self.api.put("workloads", {"metadata": metadata, "spec": spec})

    def gone(self, name: str) -> None:
        del self.api.all("workloads")[name]

    # what the operator asks for

    async def create_workload(self, workload: Json) -> Json:
        self.calls.append(f"create {workload['metadata']['name']}")
        self._refuse(None, workload)
        made = copy.deepcopy(workload)
        made["metadata"] |= {"uid": workload["metadata"]["name"], "creationTimestamp": self._now.isoformat()}
        return self.api.create("workloads", made)

    async def read_workload(self, workload: Json) -> Json | None:
        found = self.api.all("workloads").get(workload["metadata"]["name"])
        return copy.deepcopy(found)

    async def change_workload(self, workload: Json, part: str, changes: Json) -> Json:
        name = workload["metadata"]["name"]
        self.calls.append(f"change {name}'s {part}")
        before = self.api.read("workloads", name)
        after = {**before, part: merged(before.get(part) or {}, changes)}
        after["metadata"] = {**before["metadata"], "resourceVersion": workload["metadata"]["resourceVersion"]}
        self._refuse(before, after)
        return self.api.replace("workloads", after)

    async def delete_workload(self, workload: Json) -> None:
        self.calls.append(f"delete {workload['metadata']['name']}")
        self.gone(workload["metadata"]["name"])

    async def find_resource_flavor(self, version: str, name: str) -> Json | None:
        return self.flavors.get(name)

    async def find_priority_class(self, group: str, version: str, kind: str, name: str) -> Json | None:
        return {"value": self.classes[name]} if name in self.classes else None

    def _refuse(self, before: Json | None, after: Json) -> None:
        if why := refusal(before, after, slices=self.manager.slices):
            raise ApiError(422, "Invalid", why)


class QueuedJob:
    """A job in that world, which has as many pods as it has seats for, a step later."""

    def __init__(self, world: QueueWorld, spec: JobSpec, *, slices: bool = True) -> None:
        self.world, self.spec = world, spec
        self.meta = JobMeta(uid=f"uid-of-{spec.name}")
        job = JobIdentity((spec.namespace, spec.name), self.meta.uid)
        self.queue = JobQueue(job, world.cache, world, SETTINGS, slices=slices)  # type: ignore[arg-type]
        self.pods = 0
        self.begun = self.stopped = False
        self.stuck = False  # do its pods stay?
        self.restarts = 0
        self.ended: QueueEnding | None = None

    @property
    def standing(self) -> QueueStanding:
        return self.queue.standing

    @property
    def seats(self) -> int:
        return self.standing.seats or 0

    async def step(self) -> None:
        """As the operator does, and then the pods follow."""
        now = JobNow(pods=self.pods, begun=self.begun, trains=self.begun)
        await self.queue.reconcile(self.spec, now, stopped=self.stopped, ended=self.ended)
        runs = self.seats > 0 and not self.stopped and self.ended is None
        self.restarts += runs and not self.begun
        self.begun = runs
        wanted = self.seats + self.spec.standby.workers if runs else 0
        self.pods = self.pods if self.stuck else wanted

    def workload(self, number: int) -> Json:
        return self.world.api.all("workloads")[workload_name(self.spec, self.meta, number)]


async def run(world: QueueWorld, jobs: list[QueuedJob], seconds: float) -> None:
    """A second after the other; never more is used than there is."""
    for _ in range(round(seconds)):
        for job in jobs:
            await job.step()
        world.pass_time(1.0)
        assert sum(map(usage, world.workloads)) <= world.manager.quota
