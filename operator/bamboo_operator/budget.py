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
from bamboo.coordinator.protection import protection
from bamboo.job.spec import DisruptionBudget, JobSpec, RedundancyMode, wanted_workers
from bamboo.names import LABEL_JOB_UID
from bamboo_operator.api import ApiError
from bamboo_operator.pods import JobMeta, about_workers

REFUSED = (403, 404, 405, 422)  # by the operator's own rights, or by a server that has no such thing
RETRY_SECONDS = 60.0  # after that; NB: an API server that has just started forbids everything for a moment


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
    spare = 1 if protection(status, spec).holds and not leaving else 0
    return max(0, placed - spare)


def disruption_budget(job: JobSpec, meta: JobMeta, least: int) -> dict[str, Any]:
    """NB: a number that may be missing would ask for the scale of the BambooJob, which counts pipelines."""
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


class Budgets(Protocol):
    """Of an API server."""

    async def apply_disruption_budget(self, budget: dict[str, Any]) -> None: ...

    async def delete_disruption_budget(self, namespace: str, name: str) -> None: ...


class Budget:
    """One job's, as it was written last. told: takes what the user is to hear.

    fresh: the job has never run, so there is none yet.
    """

    def __init__(self, api: Budgets, meta: JobMeta, tell: Callable[[Emit], None], *, fresh: bool) -> None:
        self._api, self._meta, self._tell = api, meta, tell
        self._least: int | None = None
        self._known = fresh
        self._refused, self._retry_at = False, -math.inf  # time.monotonic()

    async def keep(self, status: Status, spec: JobSpec, placed: int) -> None:
        """Brings it up to date. Raises what is in API_ERRORS, but for what may be refused for ever: that is told once,
        and tried again now and then.

        A coordinator that has just been restarted does not know who protects whom: then it stays as it is.
        """
        if status.phase != "Recovering":
            await self._be(least_healthy(status, spec, placed), spec)

    async def end(self, spec: JobSpec) -> None:
        """The job trains no more."""
        self._retry_at = -math.inf
        await self._be(None, spec)

    async def _be(self, least: int | None, spec: JobSpec) -> None:
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
                self._tell(Emit("ClusterRefuses", f"no PodDisruptionBudget for the workers: {error.message}", True))
            self._refused, self._known, self._retry_at = True, False, time.monotonic() + RETRY_SECONDS
        else:
            self._refused, self._known, self._least = False, True, least
