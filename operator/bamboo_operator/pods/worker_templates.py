"""The template from which a job's workers' pods are created, and which pods are out of date.

The pods themselves are its only record, so any operator knows it.
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
    """All that determines a pod, except its number and its pool."""

    job: JobSpec
    meta: JobMeta
    settings: WorkerPodSettings

    def pod(self, number: int, pool: NodePool | None, group: int = 0) -> dict[str, Any]:
        """Return the pod of the worker with this number.

        pool: by now it may have another template than in this job. group: the pods that have to be in the same zone, if
        the job asks for that.
        """
        name = pool.name if pool is not None else None
        own = next((one for one in self.job.node_pools if one.name == name), pool)
        return worker_pod(self.job, self.meta, number, own, self.settings, group)

    def revisions(self) -> dict[str | None, str]:
        """Return the revisions by the pool's name; None stands for pods without a pool."""
        pools: tuple[NodePool | None, ...] = (None, *self.job.node_pools)
        return {p.name if p else None: worker_revision(self.job, self.meta, p, self.settings) for p in pools}


class WorkerTemplates:
    """The newest templates of one job's workers, and the check whether a pod matches them."""

    def __init__(self, meta: JobMeta, settings: WorkerPodSettings) -> None:
        self._meta, self._settings = meta, settings
        self._newest: WorkerTemplate | None = None
        self._revisions: dict[str | None, str] = {}  # of the newest

    def newest(self, job: JobSpec) -> WorkerTemplate:
        """Return the template of the job's current spec and this operator's settings."""
        if self._newest is None or self._newest.job is not job:
            self._newest = WorkerTemplate(job=job, meta=self._meta, settings=self._settings)
            self._revisions = self._newest.revisions()
        return self._newest

    def revision(self, job: JobSpec) -> str:
        """Return the newest template's name for people: the revision of the first pool's pods."""
        pools = self.newest(job).job.node_pools
        return self._revisions[pools[0].name if pools else None]

    def revisions(self, job: JobSpec) -> frozenset[str]:
        """Return the revisions of the pods of all pools."""
        self.newest(job)
        return frozenset(self._revisions.values())

    def is_newest(self, job: JobSpec, pod: Json) -> bool:
        """Return whether the pod matches the current template; not if its pool is gone, or selects other nodes now."""
        self.newest(job)
        labels = (pod.get("metadata") or {}).get("labels") or {}
        return labels.get(names.LABEL_WORKER_REVISION) == self._revisions.get(worker_pool(pod))
