"""The template from which a job's workers' pods are created, and which pods are out of date.

The pods themselves are its only record, so any operator knows it.
"""

from collections.abc import Mapping
from typing import Any

from bamboo_core import names
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_operator.manifests.worker_pod import WorkerPodSettings, worker_pod, worker_pool, worker_revision

Json = Mapping[str, Any]


class WorkerTemplates:
    """The newest templates of one job's workers. uid: of the job. settings: of this operator."""

    def __init__(self, uid: str, settings: WorkerPodSettings) -> None:
        self._uid, self._settings = uid, settings
        self._newest: tuple[JobSpec | None, dict[str | None, str]] = None, {}  # revisions by pool, None for no pool

    def pod(self, job: JobSpec, number: int, pool: NodePool | None, group: int = 0) -> dict[str, Any]:
        """Return the pod of the worker with this number.

        pool: by now it may have another template than in this job. group: the pods that have to be in the same zone, if
        the job asks for that.
        """
        own = next((one for one in job.node_pools if pool is not None and one.name == pool.name), pool)
        return worker_pod(job, self._uid, number, own, self._settings, group)

    def revision(self, job: JobSpec) -> str:
        """Return the newest template's name for people: the revision of the first pool's pods."""
        return self._revisions(job)[job.node_pools[0].name if job.node_pools else None]

    def revisions(self, job: JobSpec) -> frozenset[str]:
        """Return the revisions of the pods of all pools."""
        return frozenset(self._revisions(job).values())

    def is_newest(self, job: JobSpec, pod: Json) -> bool:
        """Return whether the pod matches the current template; not if its pool is gone, or selects other nodes now."""
        labels = (pod.get("metadata") or {}).get("labels") or {}
        return labels.get(names.LABEL_WORKER_REVISION) == self._revisions(job).get(worker_pool(pod))

    def _revisions(self, job: JobSpec) -> dict[str | None, str]:
        if self._newest[0] is not job:
            pools: tuple[NodePool | None, ...] = (None, *job.node_pools)
            found = {p.name if p else None: worker_revision(job, self._uid, p, self._settings) for p in pools}
            self._newest = job, found
        return self._newest[1]
