"""The PodDisruptionBudget of a job: drains and other evictions take its workers one at a time.

With one pipeline two neighbours hold all copies of a stage between them, so that a drain of both their nodes would end
the job. The budget lets one worker go, and the next only when every stage is held twice again. It is a floor on healthy
pods, and names the pods that it is about: those of workers that have joined. Any other one could become healthy before
the operator moves the floor, and two of those that hold state could go for it. Both are written at once, so that never
more than one may go, also while the operator is away.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from bamboo_core.coordinator.events import Emit, Status, WorkerState
from bamboo_core.coordinator.protection import spares_any_worker
from bamboo_core.job.spec import JobSpec, RedundancyMode, wanted_workers
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError
from bamboo_core.names import LABEL_JOB_UID, LABEL_WORKER_INDEX
from bamboo_operator.manifests.worker_pod import JobMeta, about_workers

REFUSED = (403, 404, 405, 422)  # by the operator's own rights, or by a server that has no such thing
REPAIR_SECONDS = 60.0  # after which what somebody else may have deleted or changed is written again
RETRY_SECONDS = 60.0  # after that; an API server that has just started forbids everything for a moment


def least_healthy(status: Status, spec: JobSpec, joined: int) -> int | None:
    """How many of the workers' pods have to stay; None if evictions are not to be limited.

    joined: the pods of workers that have joined: what waits for a node or an image may wait for long, and has no state.
    Not limited is a job that has nothing to lose yet, that is one worker and so can never be held twice, or that has
    neither redundancy nor a second pipeline: there a budget would only hold up drains.
    """
    held_twice = spec.redundancy.mode is not RedundancyMode.NONE or len(status.grid) > 1
    if wanted_workers(spec) == 1 or not (held_twice and status.grid):
        return None
    leaving = any(state is WorkerState.LEAVING for _, state in status.workers)
    spare = 1 if spares_any_worker(status) and not leaving else 0
    return max(0, joined - spare)


def disruption_budget(job: JobSpec, meta: JobMeta, least: int, workers: Sequence[int]) -> dict[str, Any]:
    """The budget that keeps so many of a job's workers. workers: the numbers of those that it is about.

    minAvailable, for maxUnavailable would make Kubernetes read the BambooJob's scale, which counts pipelines.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": about_workers(job, meta),
        "spec": {
            "minAvailable": least,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {LABEL_JOB_UID: meta.uid},
                "matchExpressions": [
                    {"key": LABEL_WORKER_INDEX, "operator": "In", "values": [str(number) for number in workers]}
                ],
            },
        },
    }


class DisruptionBudgetWriter:
    """One job's, as it was written last. record: takes an event for the user.

    fresh: the job has never run, so there is none yet.
    """

    def __init__(self, api: KubeApi, meta: JobMeta, record: Callable[[Emit], None], *, fresh: bool) -> None:
        self._api, self._meta, self._record = api, meta, record
        self._written: tuple[int, Sequence[int]] | None = None
        self._known = fresh
        self._refused, self._retry_at = False, -math.inf  # time.monotonic()
        self._repair_at = -math.inf  # of one that is there

    async def update(self, status: Status, spec: JobSpec, workers: Sequence[int]) -> None:
        """Brings it up to date. workers: the numbers of those that have joined and whose pods live.

        Raises RemoteError, except what may be refused for ever: reported once, and tried again now and then.
        A coordinator that has just been restarted does not know who protects whom: then it stays as it is.
        """
        if status.phase == "Recovering":
            return
        least = least_healthy(status, spec, len(workers))
        if least is None or workers:
            await self._write(None if least is None else (least, workers), spec)

    async def remove(self, spec: JobSpec) -> None:
        """The job trains no more."""
        self._retry_at = -math.inf
        await self._write(None, spec)

    async def _write(self, wanted: tuple[int, Sequence[int]] | None, spec: JobSpec) -> None:
        now = time.monotonic()
        kept = self._known and wanted == self._written and (wanted is None or now < self._repair_at)
        if now < self._retry_at or kept:
            return
        try:
            if wanted is None:
                await self._api.delete_disruption_budget(spec.namespace, about_workers(spec, self._meta)["name"])
            else:
                await self._api.apply_disruption_budget(disruption_budget(spec, self._meta, *wanted))
        except ApiError as error:
            if error.status not in REFUSED:
                raise
            if not self._refused:
                message = f"no PodDisruptionBudget for the workers: {error}"
                self._record(Emit("ClusterRefuses", message, True))
            self._refused, self._known, self._retry_at = True, False, time.monotonic() + RETRY_SECONDS
        else:
            self._refused, self._known, self._written = False, True, wanted
            self._repair_at = -math.inf if wanted is None else now + REPAIR_SECONDS
