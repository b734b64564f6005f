"""One job's rollout: what is seen of its workers, how far it is, and the events about it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bamboo_core.coordinator.events import Emit, Status, WorkerState
from bamboo_core.coordinator.protection import spares_any_worker
from bamboo_core.coordinator.wanted_workers import WantedWorkers
from bamboo_core.coordinator.workers.failures import by_itself
from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.objects import parsed_time, utc_now
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
from bamboo_operator.pods.starting.startup_problems import StartupProblem, startup_problems
from bamboo_operator.pods.worker_templates import WorkerTemplate, WorkerTemplates
from bamboo_operator.signals.signals import lives, worker_exit

Pods = Mapping[WorkerId, dict[str, Any]]
READY = (WorkerState.STANDBY, WorkerState.SYNCING, WorkerState.TRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a reconciliation sees."""

    wanted: WantedWorkers
    status: Status
    pods: Pods  # all of the job's
    startup_events: Mapping[str, StartupProblem]  # what events say of pods that do not start, by their uids

    @property
    def job(self) -> JobSpec:
        return self.wanted.spec

    @property
    def living(self) -> Pods:
        return {name: pod for name, pod in self.pods.items() if lives(pod) and name not in self.wanted.gone}


class RollingChange:
    """The replacement of a job's workers, one after the other. record: takes events for the user."""

    def __init__(self, templates: WorkerTemplates, record: Callable[[Emit], None]) -> None:
        self._templates, self._emit = templates, record
        self._record: RolloutRecord | None = None
        self._view: RolloutView | None = None
        self._invalid: tuple[str, str] | None = None  # a revision, and why the API server refuses its pods

    @property
    def record(self) -> RolloutRecord | None:
        """The record of the rollout; None if it is not known yet."""
        return self._record

    @property
    def progresses(self) -> bool:
        """Whether workers are being replaced."""
        return self._record is not None and self._record.state is RolloutState.PROGRESSING

    def look(self, sight: Sight) -> None:
        """Update the record. A coordinator that has just been restarted knows no worker yet: then everything stays as
        it was.
        """
        if sight.status.phase == "Recovering":
            self._view = None
            return
        before, view, now = self._record, self._seen(sight), time.monotonic()
        self._view, self._record = view, observed(before, view, now, utc_now())
        self._report(before, self._record)

    def template(self, sight: Sight) -> WorkerTemplate:
        """Return the template of which missing workers are made."""
        return self._templates.newest(sight.job)

    def step(self) -> RolloutStep:
        return next_step(self._record, self._view) if self._record and self._view else NOTHING

    def released(self) -> None:
        """Note that an old worker was let go."""
        assert self._record is not None
        self._record = released(self._record)

    def invalid(self, why: str) -> None:
        """Note that the API server refuses the newest template's pods whatever else there is."""
        assert self._record is not None
        self._invalid = self._record.revision, why

    @property
    def proven(self) -> bool:
        """Whether a worker of the newest template is ready."""
        return self._record is not None and self._record.updated > 0

    def _seen(self, sight: Sight) -> RolloutView:
        job, status = sight.job, sight.status
        revision = self._templates.revision(job)
        ready = {w for w, state in status.workers if state in READY and w in sight.living}
        states = dict(status.workers)
        workers = tuple(
            RolloutWorker(
                name=name,
                updated=self._templates.is_newest(job, pod),
                placed=bool(pod["spec"].get("nodeName")) or name in states,  # no watch may have told of its node
                ready=name in ready,
                idle=states.get(name) is WorkerState.STANDBY,
                leaving=states.get(name) is WorkerState.LEAVING,
            )
            for name, pod in sight.living.items()
        )
        if self._invalid is not None and self._invalid[0] != revision:
            self._invalid = None
        since = self._record.since if self._record else self._began(sight)
        late = {w.name: sight.pods[w.name] for w in workers if w.updated and not w.ready}
        problems = startup_problems(late, sight.startup_events)
        return RolloutView(
            revision=revision,
            templates=self._templates.revisions(job),
            workers=workers,
            wanted=sight.wanted.number,
            begun=sight.wanted.begun,
            training=status.phase == "Running",
            held=_held(status, job),
            since=since,
            failures=tuple(self._failures(sight, since)),
            futile=self._invalid[1] if self._invalid else self._misfit(sight, since),
            problem=problems[0].message if problems else "",
        )

    def _began(self, sight: Sight) -> datetime | None:
        """Return since when pods are made of the newest template only; None if there are no others."""
        outdated = [pod for pod in sight.living.values() if not self._templates.is_newest(sight.job, pod)]
        return max(filter(None, map(_made_at, outdated)), default=None)

    def _failures(self, sight: Sight, since: datetime | None) -> list[str]:
        """Return how workers of the newest template have ended by themselves since the rollout began."""
        found = {name: worker_exit(pod) for name, pod in sight.pods.items() if self._tried(sight, name, since)}
        ended = {name: end for name, end in found.items() if end is not None}
        return [f"{name} {said}" for name, (code, said) in ended.items() if code and by_itself(code)]

    def _misfit(self, sight: Sight, since: datetime | None) -> str:
        """Return why the workers of the newest template are refused, if one was."""
        misfit = sight.wanted.misfit
        return misfit[1] if misfit is not None and self._tried(sight, misfit[0], since) else ""

    def _tried(self, sight: Sight, name: WorkerId, since: datetime | None) -> bool:
        """Return whether that pod is one of this rollout, which began then."""
        pod = sight.pods.get(name)
        if pod is None or since is None or not self._templates.is_newest(sight.job, pod):
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


def _made_at(pod: Mapping[str, Any]) -> datetime | None:
    return parsed_time(pod["metadata"].get("creationTimestamp"))


def _held(status: Status, job: JobSpec) -> bool:
    """Return whether every stage is held twice, if it is meant to be, and run by a worker of its own."""
    owners = Counter(owner for row in status.grid for owner, _ in row)
    alone = job.redundancy.mode is RedundancyMode.NONE and len(status.grid) == 1
    return (spares_any_worker(status) or alone) and max(owners.values(), default=0) == 1
