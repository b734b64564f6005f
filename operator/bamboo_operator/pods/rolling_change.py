"""One job's rollout: observations of its workers, the record of its progress, and the events about it."""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from bamboo_core import names
from bamboo_core.coordinator.events import Emit, Status, WorkerState
from bamboo_core.coordinator.protection import spares_any_worker
from bamboo_core.coordinator.workers.failures import by_itself
from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.objects import parsed_time, utc_now
from bamboo_operator.manifests.worker_pod import WorkerPodSettings, worker_pod, worker_pool, worker_revision
from bamboo_operator.pods.rollout import (
    NOTHING,
    RolloutRecord,
    RolloutState,
    RolloutStep,
    RolloutView,
    RolloutWorker,
    next_step,
    observed,
    released,
)
from bamboo_operator.pods.starting import startup_problems
from bamboo_operator.pods.view import PodsByName, PodsView
from bamboo_operator.signals.signals import worker_exit

Json = Mapping[str, Any]


class WorkerTemplates:
    """The newest templates of one job's workers. uid: the job's UID. settings: this operator's settings."""

    def __init__(self, uid: str, settings: WorkerPodSettings) -> None:
        self._uid, self._settings = uid, settings
        self._newest: tuple[JobSpec | None, dict[str | None, str]] = None, {}  # revisions by pool, None for no pool

    def pod(self, job: JobSpec, number: int, pool: NodePool | None, group: int = 0) -> dict[str, Any]:
        """Return the pod of the worker with this number.

        pool: the worker's pool; if `job` has a pool of that name, this uses the job's version. group: the pod's zone
        group; 0 unless the spread is ZonePerPipeline.
        """
        own = next((one for one in job.node_pools if pool is not None and one.name == pool.name), pool)
        return worker_pod(job, self._uid, number, own, self._settings, group)

    def revision(self, job: JobSpec) -> str:
        """Return the newest revision that a rollout reports: the first pool's, or that of pods without a pool."""
        return self._revisions(job)[job.node_pools[0].name if job.node_pools else None]

    def revisions(self, job: JobSpec) -> frozenset[str]:
        """Return the newest revisions: each pool's, and that of pods without a pool."""
        return frozenset(self._revisions(job).values())

    def is_newest(self, job: JobSpec, pod: Json) -> bool:
        """Return whether the pod matches the current template of its pool; False if the job has no such pool
        any more.
        """
        labels = (pod.get("metadata") or {}).get("labels") or {}
        return bool(labels.get(names.LABEL_WORKER_REVISION, "") == self._revisions(job).get(worker_pool(pod)))

    def _revisions(self, job: JobSpec) -> dict[str | None, str]:
        if self._newest[0] is not job:
            pools: tuple[NodePool | None, ...] = (None, *job.node_pools)
            found = {p.name if p else None: worker_revision(job, self._uid, p, self._settings) for p in pools}
            self._newest = job, found
        return self._newest[1]


READY = (WorkerState.STANDBY, WorkerState.SYNCING, WorkerState.TRAINING)


class RollingChange:
    """A job's rollout: the replacement of its outdated workers, one at a time. record: takes events for the user."""

    def __init__(self, templates: WorkerTemplates, record: Callable[[Emit], None]) -> None:
        self.templates, self._emit = templates, record
        self.record: RolloutRecord | None = None  # None before the first look
        self._invalid: tuple[str, str] | None = None  # a revision, and why the API server refuses its pods

    @property
    def progresses(self) -> bool:
        """Whether workers are being replaced."""
        return self.record is not None and self.record.state is RolloutState.PROGRESSING

    def look(self, view: PodsView) -> None:
        """Update the record from the workers' pods, and emit events about it. After a restart of the coordinator the
        record stays as it is until the coordinator knows its workers again.
        """
        if view.status.phase == "Recovering":
            return
        before = self.record
        self.record = observed(before, self._seen(view), view.now, utc_now())
        self._report(before, self.record)

    def step(self, view: PodsView) -> RolloutStep:
        """Return the next step, as `next_step` does; NOTHING while a restarted coordinator waits for its workers."""
        if self.record is None or not self.progresses or view.status.phase == "Recovering":
            return NOTHING
        return next_step(self.record, self._seen(view))

    def released(self) -> None:
        """Note that the rollout has released a worker whose pod is outdated."""
        assert self.record is not None
        self.record = released(self.record)

    def invalid(self, why: str) -> None:
        """Record that the API server rejects the newest pod template as invalid, not for a lack of quota or permission.
        why: a sentence for the user.
        """
        assert self.record is not None
        self._invalid = self.record.revision, why

    @property
    def proven(self) -> bool:
        """Whether a worker of the newest template is ready."""
        return self.record is not None and self.record.updated > 0

    def _seen(self, view: PodsView) -> RolloutView:
        job, status, living = view.spec, view.status, _living(view)
        revision = self.templates.revision(job)
        ready = {w for w, state in status.workers if state in READY and w in living}
        states = dict(status.workers)
        workers = tuple(
            RolloutWorker(
                name=name,
                updated=self.templates.is_newest(job, pod),
                placed=bool(pod["spec"].get("nodeName")) or name in states,  # the watch may not show its node yet
                ready=name in ready,
                idle=states.get(name) is WorkerState.STANDBY,
                leaving=states.get(name) is WorkerState.LEAVING,
            )
            for name, pod in living.items()
        )
        if self._invalid is not None and self._invalid[0] != revision:
            self._invalid = None
        since = self.record.since if self.record else self._began(view)
        late = {w.name: view.pods[w.name] for w in workers if w.updated and not w.ready}
        problems = startup_problems(late, view.startup_events)
        return RolloutView(
            revision=revision,
            templates=self.templates.revisions(job),
            workers=workers,
            wanted=view.wanted.number,
            begun=view.wanted.begun,
            training=status.phase == "Running",
            held=_held(status, job),
            since=since,
            failures=tuple(self._failures(view, since)),
            futile=self._invalid[1] if self._invalid else self._misfit(view, since),
            problem=problems[0].message if problems else "",
        )

    def _began(self, view: PodsView) -> datetime | None:
        """Return when the newest outdated pod was created; younger pods are of the newest template. None without
        outdated pods.
        """
        outdated = [pod for pod in _living(view).values() if not self.templates.is_newest(view.spec, pod)]
        return max(filter(None, map(_made_at, outdated)), default=None)

    def _failures(self, view: PodsView, since: datetime | None) -> list[str]:
        """Return a sentence for each worker of the newest template that has failed by itself since the rollout
        began.
        """
        found = {name: worker_exit(pod) for name, pod in view.pods.items() if self._tried(view, name, since)}
        ended = {name: end for name, end in found.items() if end is not None}
        return [f"{name} {detail}" for name, (code, detail) in ended.items() if code and by_itself(code)]

    def _misfit(self, view: PodsView, since: datetime | None) -> str:
        """Return why the coordinator refused its last refused worker, if the rollout created it (`_tried`); else ""."""
        misfit = view.wanted.misfit
        return misfit[1] if misfit is not None and self._tried(view, misfit[0], since) else ""

    def _tried(self, view: PodsView, name: WorkerId, since: datetime | None) -> bool:
        """Return whether a pod is of the newest template and not older than the rollout, which began at `since`."""
        pod = view.pods.get(name)
        if pod is None or since is None or not self.templates.is_newest(view.spec, pod):
            return False
        made = _made_at(pod)
        return made is not None and made >= whole_seconds(since)

    def _report(self, before: RolloutRecord | None, now: RolloutRecord) -> None:
        if now.active and (before is None or not before.active or before.revision != now.revision):
            count = now.total - now.updated
            text = f"{count} worker(s) are not of revision {now.revision}; they are replaced one after the other"
            self._emit(Emit("RolloutStarted", text))
        if now.stalled and (before is None or before.stalled != now.stalled):
            self._emit(Emit("RolloutStalled", now.message, True))
        if before is not None and before.active and not now.active:
            self._emit(Emit("RolloutComplete", f"all workers are of revision {now.revision}"))


def _living(view: PodsView) -> PodsByName:
    return {name: pod for name, pod in view.living.items() if name not in view.wanted.gone}


def _made_at(pod: Mapping[str, Any]) -> datetime | None:
    return parsed_time(pod["metadata"].get("creationTimestamp"))


def _held(status: Status, job: JobSpec) -> bool:
    """Return whether no worker runs two stages and, with redundancy or several pipelines, at least two workers hold
    every stage. False without a plan.
    """
    owners = Counter(owner for row in status.grid for owner, _ in row)
    alone = job.redundancy.mode is RedundancyMode.NONE and len(status.grid) == 1
    return (spares_any_worker(status) or alone) and max(owners.values(), default=0) == 1
