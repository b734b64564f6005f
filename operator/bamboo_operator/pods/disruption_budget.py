"""The PodDisruptionBudget of a job: drains and other evictions take its workers one at a time.

With one pipeline two neighbours hold all copies of a stage between them, so that a drain of both their nodes would end
the job. The budget lets one worker go, and the next only when every stage is held twice again. It is a floor on healthy
pods, which the operator moves: a floor that it cannot move while it is away lets at most one more go.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from bamboo.coordinator.events import Emit, Status, WorkerState
from bamboo.coordinator.protection import spares_any_worker
from bamboo.job.placement_spec import DisruptionBudget
from bamboo.job.spec import JobSpec, RedundancyMode, wanted_workers
from bamboo.kube.errors import ApiError
from bamboo.names import LABEL_JOB_UID
from bamboo_operator.manifests.worker_pod import JobMeta, about_workers

REFUSED = (403, 404, 405, 422)  # by the operator's own rights, or by a server that has no such thing
RETRY_SECONDS = 60.0  # after that; an API server that has just started forbids everything for a moment


def least_healthy(status: Status, spec: JobSpec, placed: int) -> int | None:
    """How many of the workers' pods have to stay; None if evictions are not to be limited.

    placed: pods that live, have a node, and are not kept from starting there: what waits for a node or an image counts
    as healthy nowhere, and may wait for long.
    Not limited is a job that has nothing to lose yet, that is one worker and so can never be held twice, or that has
    neither redundancy nor a second pipeline: there a budget would only hold up drains.
    """
    wanted = spec.disruption_budget is not DisruptionBudget.NONE and wanted_workers(spec) > 1
    held_twice = spec.redundancy.mode is not RedundancyMode.NONE or len(status.grid) > 1
    if not (wanted and held_twice and status.grid):
        return None
    leaving = any(state is WorkerState.LEAVING for _, state in status.workers)
    spare = 1 if spares_any_worker(status) and not leaving else 0
    return max(0, placed - spare)


def disruption_budget(job: JobSpec, meta: JobMeta, least: int) -> dict[str, Any]:
    """minAvailable, for maxUnavailable would make Kubernetes read the BambooJob's scale, which counts pipelines."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": about_workers(job, meta),
        "spec": {
            "minAvailable": least,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {LABEL_JOB_UID: meta.uid}},
        },
    }


class DisruptionBudgetApi(Protocol):
    """Of an API server."""

    async def apply_disruption_budget(self, budget: dict[str, Any]) -> None: ...

    async def delete_disruption_budget(self, namespace: str, name: str) -> None: ...


class DisruptionBudgetWriter:
    """One job's, as it was written last. record: takes an event for the user.

    fresh: the job has never run, so there is none yet.
    """

    def __init__(self, api: DisruptionBudgetApi, meta: JobMeta, record: Callable[[Emit], None], *, fresh: bool) -> None:
        self._api, self._meta, self._record = api, meta, record
        self._least: int | None = None
        self._known = fresh
        self._refused, self._retry_at = False, -math.inf  # time.monotonic()

    async def update(self, status: Status, spec: JobSpec, placed: int) -> None:
        """Brings it up to date. Raises what is in API_ERRORS, except what may be refused for ever: reported once,
        and tried again now and then.

        A coordinator that has just been restarted does not know who protects whom: then it stays as it is.
        """
        if status.phase != "Recovering":
            await self._write(least_healthy(status, spec, placed), spec)

    @property
    def retry_at(self) -> float:
        """When what was refused is tried again (time.monotonic()); in the past if nothing was."""
        return self._retry_at

    async def remove(self, spec: JobSpec) -> None:
        """The job trains no more."""
        self._retry_at = -math.inf
        await self._write(None, spec)

    async def _write(self, least: int | None, spec: JobSpec) -> None:
        if time.monotonic() < self._retry_at or (self._known and least == self._least):
            return
        try:
            if least is None:
                await self._api.delete_disruption_budget(spec.namespace, about_workers(spec, self._meta)["name"])
            else:
                await self._api.apply_disruption_budget(disruption_budget(spec, self._meta, least))
        except ApiError as error:
            if error.status not in REFUSED:
                raise
            if not self._refused:
                message = f"no PodDisruptionBudget for the workers: {error}"
                self._record(Emit("ClusterRefuses", message, True))
            self._refused, self._known, self._retry_at = True, False, time.monotonic() + RETRY_SECONDS
        else:
            self._refused, self._known, self._least = False, True, least
