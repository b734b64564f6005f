"""The PodDisruptionBudget of a job: drains and other evictions take its workers one at a time.

With one pipeline and one replica, two workers hold all copies of a stage, so that draining both their nodes would lose
it. The budget lets one worker go, and the next one only when two workers hold every stage again. Its minAvailable
counts only pods of workers that have joined, selected by number: another pod could become healthy before the operator
raises minAvailable, and then two pods with state could be evicted. The operator writes minAvailable and the selection
in one request, so that at most one healthy pod may be evicted, even while the operator is away.
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
from bamboo_operator.manifests.worker_pod import about_workers

REFUSED = (403, 404, 405, 422)  # the operator lacks the right, or the server lacks the kind
REPAIR_SECONDS = 60.0  # after which budget and network policy are written again, in case somebody changed them
RETRY_SECONDS = 60.0  # after a refusal; an API server that has just started forbids everything for a moment


def least_healthy(status: Status, spec: JobSpec, joined: int) -> int | None:
    """Return the minAvailable of the budget: how many workers' pods have to stay; None if the job does not limit
    evictions.

    joined: the number of pods whose workers have joined. A pod that waits for a node or an image has no state. A job
    does not limit evictions before its first plan, with a single worker, or with neither redundancy nor a second
    pipeline: in these cases a budget would only delay drains.
    """
    held_twice = spec.redundancy.mode is not RedundancyMode.NONE or len(status.grid) > 1
    if wanted_workers(spec) == 1 or not (held_twice and status.grid):
        return None
    leaving = any(state is WorkerState.LEAVING for _, state in status.workers)
    spare = 1 if spares_any_worker(status) and not leaving else 0
    return max(0, joined - spare)


def disruption_budget(job: JobSpec, uid: str, least: int, workers: Sequence[int]) -> dict[str, Any]:
    """Return the manifest of the budget that keeps at least `least` of these workers. workers: their numbers.

    It uses minAvailable: for maxUnavailable Kubernetes would read the BambooJob's scale, which counts pipelines.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": about_workers(job, uid),
        "spec": {
            "minAvailable": least,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {LABEL_JOB_UID: uid},
                "matchExpressions": [
                    {"key": LABEL_WORKER_INDEX, "operator": "In", "values": [str(number) for number in workers]}
                ],
            },
        },
    }


class DisruptionBudgetWriter:
    """The writer of one job's PodDisruptionBudget, which remembers what it wrote last.

    record: takes an event for the user. fresh: the job has never run, so it has no budget yet.
    """

    def __init__(self, api: KubeApi, uid: str, record: Callable[[Emit], None], *, fresh: bool) -> None:
        self._api, self._uid, self._record = api, uid, record
        self._written: tuple[int, Sequence[int]] | None = None
        self._known = fresh
        self._refused, self._retry_at = False, -math.inf  # time.monotonic()
        self._repair_at = -math.inf  # when an existing budget is written again

    async def update(self, status: Status, spec: JobSpec, workers: Sequence[int]) -> None:
        """Write the budget if it has changed or REPAIR_SECONDS have passed; delete it if the job does not limit
        evictions.

        workers: the numbers of the living workers that have joined. Without any, this writes no budget. While a
        restarted coordinator does not know which workers hold replicas, this does nothing. Raises RemoteError, except
        for a refusal (REFUSED): this reports it once, and tries again every RETRY_SECONDS.
        """
        if status.phase == "Recovering":
            return
        least = least_healthy(status, spec, len(workers))
        if least is None or workers:
            await self._write(None if least is None else (least, workers), spec)

    async def remove(self, spec: JobSpec) -> None:
        """Delete the budget of a job that has stopped training. Raises RemoteError as `update` does."""
        self._retry_at = -math.inf
        await self._write(None, spec)

    async def _write(self, wanted: tuple[int, Sequence[int]] | None, spec: JobSpec) -> None:
        now = time.monotonic()
        kept = self._known and wanted == self._written and (wanted is None or now < self._repair_at)
        if now < self._retry_at or kept:
            return
        try:
            if wanted is None:
                await self._api.delete_disruption_budget(spec.namespace, about_workers(spec, self._uid)["name"])
            else:
                await self._api.apply_disruption_budget(disruption_budget(spec, self._uid, *wanted))
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
