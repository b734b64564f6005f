"""`bamboo.Client`: the jobs of a cluster."""

from collections.abc import Iterator
from types import TracebackType

from bamboo import background
from bamboo.jobs.cluster_access import cluster_access
from bamboo.jobs.handle import JobHandle
from bamboo.jobs.job import Job
from bamboo.jobs.results import JobProgress


class Client:
    """The jobs in a namespace of the cluster that the kubeconfig names; in a pod, of its own cluster.

    namespace, context, kubeconfig: as the flags of these names. Raises InvalidRequest, ClusterError.
    """

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        self._cluster = background.call(cluster_access(namespace, context, kubeconfig))

    @property
    def namespace(self) -> str:
        return self._cluster.namespace

    def submit(self, job: Job, *, apply: bool = False, force: bool = False, dry_run: bool = False) -> JobHandle:
        """Create the job on the cluster; with apply, or merge it into the existing one, with force also over other
        owners' fields. dry_run: only have the API server check it.
        """
        work = self._cluster.submit(job.source, apply=apply, force=force, dry_run=dry_run)
        return JobHandle(background.call(work))

    def job(self, name: str) -> JobHandle:
        """Return the job of that name. Raises ClusterError if there is none."""
        return JobHandle(background.call(self._cluster.job(name)))

    def jobs(self) -> list[JobHandle]:
        """Return all jobs of the namespace, by name."""
        return [JobHandle(job) for job in background.call(self._cluster.jobs())]

    def close(self) -> None:
        """Close the connections; jobs go on."""
        background.call(self._cluster.close())

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def watch(self) -> Iterator[JobProgress]:
        """Yield the progress of each job, now and at each change, forever."""
        shown: dict[str, JobProgress] = {}
        while True:
            yield from background.call(self._cluster.changes(shown))
