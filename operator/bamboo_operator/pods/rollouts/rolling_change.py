"""One job's rollout: what is seen of its workers, how far it is, and what is told of it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bamboo_core.coordinator.events import Emit, Status, WorkerState
from bamboo_core.coordinator.protection import spares_any_worker
from bamboo_core.coordinator.shell_view import WantedWorkers
from bamboo_core.coordinator.workers.failures import by_itself
from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.job.status import RolloutStatus
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.kube.objects import parsed_time, utc_now
from bamboo_operator.pods.rollouts.rollout import (
    NOTHING,
    Act,
    RolloutRecord,
    RolloutState,
    RolloutStep,
    RolloutView,
    RolloutWorker,
    deadlines,
    makes_newest,
    next_step,
    observed,
    released,
)
from bamboo_operator.pods.rollouts.worker_templates import WorkerTemplate, WorkerTemplates
from bamboo_operator.pods.starting.startup_problems import StartupProblem, startup_problems
from bamboo_operator.signals.signals import lives, worker_exit

Pods = Mapping[WorkerId, dict[str, Any]]
READY = (WorkerState.STANDBY, WorkerState.SYNCING, WorkerState.TRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a reconciliation sees."""

    wanted: WantedWorkers
    status: Status
    pods: Pods  # all of the job's
    waited: float  # seconds for which some pod has found no node
    startup_events: Mapping[str, StartupProblem]  # what events say of pods that do not start, by their uids

    @property
    def job(self) -> JobSpec:
        return self.wanted.spec

    @property
    def living(self) -> Pods:
        return {name: pod for name, pod in self.pods.items() if lives(pod) and name not in self.wanted.gone}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why no pod is made for one more worker."""

    why: str
    revision: str  # of the pod
    since: float  # of the first one in a row (monotonic seconds)
    no_room: bool  # it may be made once another one is gone
    final: bool  # it never is


class RollingChange:
    """The replacement of a job's workers, one after the other. written: of the job's status, what an operator has
    written of its rollout. record: takes events for the user.
    """

    def __init__(
        self, templates: WorkerTemplates, written: RolloutStatus | None, record: Callable[[Emit], None]
    ) -> None:
        self._templates, self._emit = templates, record
        self._record = RolloutRecord.of(written, time.monotonic())
        self._view: RolloutView | None = None
        self._refusal: Refusal | None = None
        self.deadlines: tuple[float, ...] = ()  # when to look again though nothing has happened (time.monotonic())
        self.surged: frozenset[WorkerId] = frozenset()  # workers that were requested beyond those wanted

    @property
    def record(self) -> RolloutRecord | None:
        """The record of the rollout; None if it is not known yet."""
        return self._record

    @property
    def rolls(self) -> bool:
        """Are surplus workers its own? So is one that was requested for it, until it has come or is gone."""
        coming = self._view is not None and any(w.name in self.surged for w in self._view.coming)
        return coming or (self._record is not None and self._record.state is RolloutState.PROGRESSING)

    def look(self, sight: Sight) -> None:
        """A coordinator that has just been restarted knows no worker yet: then everything stays as it was."""
        if sight.status.phase == "Recovering":
            self._view, self.deadlines = None, ()
            return
        self.surged &= sight.living.keys()
        before, view, now = self._record, self._seen(sight), time.monotonic()
        self._view, self._record = view, observed(before, view, now, utc_now())
        self.deadlines = tuple(deadlines(self._record, view, now))
        self._report(before, self._record)

    @property
    def tries_again(self) -> bool:
        """Was a pod refused that may be made once there is room, or a right, of which nobody tells?"""
        again = self._refusal is not None and not self._refusal.final
        return again and self._record is not None and self._record.state is RolloutState.PROGRESSING

    def memory(self) -> tuple[object, ...]:
        """What it keeps from one look to the next, but for times."""
        return self.surged, self._record and replace(self._record, moved=0.0), self._refusal is None

    def template(self, sight: Sight) -> WorkerTemplate:
        """The template of which a missing worker is made."""
        record, view = self._record, self._view
        newest = self._templates.newest(sight.job)
        ready = self._ready(sight)
        old = {n: p for n, p in sight.living.items() if n in ready and not self._templates.is_newest(sight.job, p)}
        if not old or (record is not None and view is not None and makes_newest(record, view)):
            return newest
        return self._templates.of(sight.job, old)

    def newest(self, sight: Sight) -> WorkerTemplate:
        return self._templates.newest(sight.job)

    def step(self) -> RolloutStep:
        return next_step(self._record, self._view) if self._record and self._view else NOTHING

    def done(self, step: RolloutStep) -> None:
        """Notes that a step of the rollout was done."""
        assert self._record is not None
        self._refusal = None
        if step.act is Act.SURGE:
            self.surged |= {step.worker}
        elif step.act is Act.RELEASE:
            self._record = released(self._record)

    def refused(self, why: str, *, no_room: bool = False, final: bool = False) -> None:
        """Notes that no pod was made for one more worker, and why."""
        assert self._record is not None
        since = self._refusal.since if self._refusal else time.monotonic()
        self._refusal = Refusal(why=why, revision=self._record.revision, since=since, no_room=no_room, final=final)

    def is_known_to_work(self, sight: Sight, name: WorkerId) -> bool:
        """Is that pod as the others are, rather than as a rollout would make them, or would have?"""
        active = self._record is not None and self._record.active
        return self._templates.is_newest(sight.job, sight.pods[name]) is not active

    @property
    def proven(self) -> bool:
        """Is a worker of the newest template ready?"""
        return self._record is not None and self._record.updated > 0

    def _seen(self, sight: Sight) -> RolloutView:
        job, status = sight.job, sight.status
        revision, ready = self._templates.revision(job), self._ready(sight)
        states = dict(status.workers)
        workers = tuple(
            RolloutWorker(
                name=name,
                updated=self._templates.is_newest(job, pod),
                placed=bool(pod["spec"].get("nodeName")) or name in states,  # no watch may have told of its node
                ready=name in ready,
                idle=states.get(name) is WorkerState.STANDBY,
            )
            for name, pod in sight.living.items()
        )
        refusal = self._current_refusal(revision, paused=job.rollout.paused)
        late = {w.name: sight.pods[w.name] for w in workers if w.updated and not w.ready}
        problems = startup_problems(late, sight.startup_events)
        return RolloutView(
            revision=revision,
            section=self._templates.section_digest(job),
            workers=workers,
            wanted=sight.wanted.number,
            begun=sight.wanted.begun,
            training=status.phase == "Running",
            held=_held(status, job),
            leaving=any(state is WorkerState.LEAVING for _, state in status.workers),
            no_room=max(sight.waited, time.monotonic() - refusal.since if refusal and refusal.no_room else 0.0),
            refused=refusal.why if refusal else "",
            failures=tuple(self._failures(sight)),
            futile=refusal.why if refusal and refusal.final else self._misfit(sight),
            problem=problems[0].message if problems else "",
            paused=job.rollout.paused,
            max_surge=job.rollout.max_surge,
            deadline=job.rollout.progress_deadline_seconds,
        )

    def _current_refusal(self, revision: str, *, paused: bool) -> Refusal | None:
        """The refusal that still counts: after a pause, and with another template, what was refused is tried again."""
        if self._refusal and (paused or self._refusal.revision != revision):
            self._refusal = None
        return self._refusal

    def _ready(self, sight: Sight) -> set[WorkerId]:
        return {w for w, state in sight.status.workers if state in READY and w in sight.living}

    def _failures(self, sight: Sight) -> list[str]:
        """How workers of the newest template have ended by themselves since the rollout began."""
        found = {name: worker_exit(pod) for name, pod in sight.pods.items() if self._tried(sight, name)}
        ended = {name: end for name, end in found.items() if end is not None}
        return [f"{name} {said}" for name, (code, said) in ended.items() if code and by_itself(code)]

    def _misfit(self, sight: Sight) -> str:
        """Why the workers of the newest template are refused, if one was."""
        misfit = sight.wanted.misfit
        return misfit[1] if misfit is not None and self._tried(sight, misfit[0]) else ""

    def _tried(self, sight: Sight, name: WorkerId) -> bool:
        """Is that pod one of this rollout?"""
        pod, record = sight.pods.get(name), self._record
        if pod is None or record is None or not self._templates.is_newest(sight.job, pod):
            return False
        made = parsed_time(pod["metadata"].get("creationTimestamp"))
        return made is not None and made >= whole_seconds(record.since)

    def _report(self, before: RolloutRecord | None, now: RolloutRecord) -> None:
        if now.active and (before is None or not before.active or before.revision != now.revision):
            count = now.total - now.updated
            text = f"{count} worker(s) are not of revision {now.revision}; they are replaced one after the other"
            self._emit(Emit("RolloutStarted", text))
        if now.stalled and (before is None or before.stalled != now.stalled):
            self._emit(Emit("RolloutStalled", now.message, True))
        if before is not None and before.active and not now.active:
            self._emit(Emit("RolloutComplete", f"all workers are of revision {now.revision}"))


def _held(status: Status, job: JobSpec) -> bool:
    """Is every stage held twice, if it is meant to be, and run by a worker of its own?"""
    owners = Counter(owner for row in status.grid for owner, _ in row)
    alone = job.redundancy.mode is RedundancyMode.NONE and len(status.grid) == 1
    return (spares_any_worker(status) or alone) and max(owners.values(), default=0) == 1
