"""The templates of which a job's workers' pods were made and new ones are made, and which pods are out of date.

Nothing of it is kept but in the pods themselves and in the job's ControllerRevisions, so any operator knows it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bamboo_core import names
from bamboo_core.job.edits import PodSections
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec
from bamboo_operator.manifests.worker_pod import (
    JobMeta,
    WorkerPodSettings,
    worker_image,
    worker_number,
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
    """The templates of one job's workers. sections: what its user wrote of pods that has a digest, if it is known."""

    def __init__(
        self, meta: JobMeta, settings: WorkerPodSettings, sections: Callable[[str], PodSections | None]
    ) -> None:
        self._meta, self._settings, self._sections = meta, settings, sections
        self._newest: WorkerTemplate | None = None
        self._revisions: dict[str | None, str] = {}  # of the newest
        self._digest = ""  # of the newest one's sections

    def newest(self, job: JobSpec) -> WorkerTemplate:
        """The template as the job says it now, and as this operator makes pods."""
        if self._newest is None or self._newest.job is not job:
            self._newest = WorkerTemplate(job=job, meta=self._meta, settings=self._settings)
            self._revisions, self._digest = self._newest.revisions(), PodSections.of(job).digest
        return self._newest

    def revision(self, job: JobSpec) -> str:
        """The newest one's name for people: that of the pods of the first pool."""
        pools = self.newest(job).job.node_pools
        return self._revisions[pools[0].name if pools else None]

    def section_digest(self, job: JobSpec) -> str:
        """The digest of what the user wrote of the job's pods."""
        self.newest(job)
        return self._digest

    def is_newest(self, job: JobSpec, pod: Json) -> bool:
        """Would it be made like that now? Not if its pool is gone, or means other nodes now."""
        self.newest(job)
        labels = (pod.get("metadata") or {}).get("labels") or {}
        return labels.get(names.LABEL_WORKER_REVISION) == self._revisions.get(worker_pool(pod))

    def of(self, job: JobSpec, pods: Mapping[str, Json]) -> WorkerTemplate:
        """The template by which most likely more workers like these can be made, of which there is one at least.

        The newest of them counts. What another version of the operator did differently is not known here.
        """
        pod = max(pods.values(), key=lambda one: worker_number(one) or 0)
        digest = (pod["metadata"].get("labels") or {}).get(names.LABEL_WORKER_SPEC)
        sections = self._sections(str(digest)) or PodSections.of(job)
        plain = {name: one for name, one in pods.items() if worker_pool(one) not in sections.templates}
        image = worker_image(plain) or self._settings.image  # those of templates stay where they are said
        settings = replace(self._settings, image=image)
        return WorkerTemplate(job=sections.within(job), meta=self._meta, settings=settings)
