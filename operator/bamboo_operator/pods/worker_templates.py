"""The template of which a job's workers' pods are made, and which pods are out of date.

Nothing of it is kept but in the pods themselves, so any operator knows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bamboo_core import names
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_operator.manifests.worker_pod import (
    JobMeta,
    WorkerPodSettings,
    worker_pod,
    worker_pool,
    worker_revision,
)

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    """What a pod is made of, beside its number and its pool."""

    job: JobSpec
    meta: JobMeta
    settings: WorkerPodSettings

    def pod(self, number: int, pool: NodePool | None, group: int = 0) -> dict[str, Any]:
        """The pod of a worker of that number. pool: it may have another template by now than this one's job says.
        group: of those that are to be in the same zone, if that is asked for.
        """
        name = pool.name if pool is not None else None
        own = next((one for one in self.job.node_pools if one.name == name), pool)
        return worker_pod(self.job, self.meta, number, own, self.settings, group)

    def revisions(self) -> dict[str | None, str]:
        """The revisions by the pool's name; None stands for pods that were made for no pool."""
        pools: tuple[NodePool | None, ...] = (None, *self.job.node_pools)
        return {p.name if p else None: worker_revision(self.job, self.meta, p, self.settings) for p in pools}


class WorkerTemplates:
    """The newest templates of one job's workers, and the question whether a pod is made of them."""

    def __init__(self, meta: JobMeta, settings: WorkerPodSettings) -> None:
        self._meta, self._settings = meta, settings
        self._newest: WorkerTemplate | None = None
        self._revisions: dict[str | None, str] = {}  # of the newest

    def newest(self, job: JobSpec) -> WorkerTemplate:
        """Return the template as the job says it now, and as this operator makes pods."""
        if self._newest is None or self._newest.job is not job:
            self._newest = WorkerTemplate(job=job, meta=self._meta, settings=self._settings)
            self._revisions = self._newest.revisions()
        return self._newest

    def revision(self, job: JobSpec) -> str:
        """Return the newest one's name for people: that of the pods of the first pool."""
        pools = self.newest(job).job.node_pools
        return self._revisions[pools[0].name if pools else None]

    def revisions(self, job: JobSpec) -> frozenset[str]:
        """Return the revisions of the pods of all pools."""
        self.newest(job)
        return frozenset(self._revisions.values())

    def is_newest(self, job: JobSpec, pod: Json) -> bool:
        """Return whether the pod would be made like that now; not if its pool is gone, or means other nodes now."""
        self.newest(job)
        labels = (pod.get("metadata") or {}).get("labels") or {}
        return labels.get(names.LABEL_WORKER_REVISION) == self._revisions.get(worker_pool(pod))
