"""The coordinator of one BambooJob, driven by what the cluster and its workers say.

Its loop never waits for the API server. What it decides about the cluster is kept as what is wanted (pods to make and
to remove, events to post), and `lifecycle` brings the cluster there.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from bamboo.control.channel_events import WorkerJoined
from bamboo.control.protocol import Hello, Stop
from bamboo.control.server import Channels
from bamboo.coordinator import coordinator
from bamboo.coordinator.awake_clock import AwakeClock
from bamboo.coordinator.events import (
    Command,
    Emit,
    Event,
    Finish,
    Interrupted,
    NoticeWithdrawn,
    Outcome,
    PreemptionNotice,
    RemoveWorker,
    RequestsWithdrawn,
    Send,
    SpecChanged,
    Status,
    Tick,
    WorkerLost,
)
from bamboo.coordinator.job_status import status
from bamboo.coordinator.state import CoordinatorState
from bamboo.job.edits import task_digest
from bamboo.job.spec import JobSpec
from bamboo.names import STORAGE_FOLDER
from bamboo.page.history import Figures, JobHistory
from bamboo.planning.plan import WorkerId
from bamboo_operator.cloud_marks import DISRUPTIONS
from bamboo_operator.cluster import Cluster, owner_uid
from bamboo_operator.counts import Counts, Meter
from bamboo_operator.doors import Doors, JobKey, Reviews, pod_check
from bamboo_operator.node_marks import NodeMark
from bamboo_operator.pods import JobMeta, claim_name, weights_folder
from bamboo_operator.signals import (
    LEAST_SECONDS,
    POD_DELETED,
    Kind,
    Signal,
    is_deleted,
    node_gone,
    notice_ended,
    pod_gone,
    worker_signal,
)
from bamboo_operator.story import Story

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
LATE_SECONDS = 1.0  # of a tick: then something stood still
GIVEN_UP_SECONDS = 10.0  # after the end of its notice a worker that has not joined will not come any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a job's coordinator is made of."""

    key: JobKey
    uid: str
    spec: JobSpec
    manifest: dict[str, Any]
    resumed: bool  # the job had begun before this operator did
    judged: frozenset[WorkerId] = frozenset()  # those whose end was heard of before this coordinator, or asked for
    meter: Meter = field(default_factory=lambda: Meter(Counts()))
    marks: tuple[NodeMark, ...] = ()  # of nodes that go, which this installation has itself


class Brain:
    """The coordinator's loop. wake: called when there is something to do for the hands."""

    def __init__(
        self, job: Running, cluster: Cluster, doors: Doors, reviews: Reviews, key: bytes, wake: Callable[[], None]
    ) -> None:
        self._job, self._cluster, self._doors, self._wake = job, cluster, doors, wake
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._noticed: dict[WorkerId, float] = {}  # when they will be gone
        self._lost: set[WorkerId] = set()
        self.joined: set[WorkerId] = set()
        self.unborn: list[tuple[WorkerId, str]] = []  # ended before they joined, and how; for the hands
        self._farewells: list[Send] = []  # until the end of the job is written down
        self._interrupted = self._dismissed = False
        self._task = task_digest(job.spec)
        self._due = time.monotonic()
        self._ticker: asyncio.TimerHandle | None = None
        self._now = AwakeClock()
        self.removing: dict[WorkerId, float] = {}  # since when
        self.removed: set[WorkerId] = set()  # those that did not go, so that their pods were deleted
        self.record = JobHistory()  # for the job's page
        self.story = Story(self.record)  # not posted yet
        self.finish: Finish | None = None
        check = pod_check(job.key, reviews, self._uid_of, partial(cluster.is_of_another, job.key, job.uid))
        self._channels = Channels(self._events.put_nowait, doors.counted(check))
        self.state: CoordinatorState = coordinator.initial(
            job.spec,
            job.manifest,
            secret=hmac.new(key, job.uid.encode(), sha256).hexdigest(),
            save_path=weights_folder(job.spec, JobMeta(uid=job.uid)),
            now=self._now(),
            resumed=job.resumed,
        )

    def status(self) -> Status:
        return status(self.state, self._now())

    def plan(self) -> str | None:
        """Who runs what, as JSON: the epoch, and each pipeline's owners in the order of stages.

        And for another operator: which pods that are still there are lost, so that it does not hear of them as of
        news; and a digest of the task, which it must not find changed.
        """
        plan = self.state.plan
        if plan is None:
            return None
        rows = [[a.owner for a in row] for row in plan.pipelines]
        lost = sorted((self._lost | self.state.gone) & self._pods().keys())
        kept = {"epoch": plan.epoch, "pipelines": rows, "lost": lost, "task": self._task}
        return json.dumps(kept, separators=(",", ":"))

    async def run(self) -> None:
        """Until cancelled: who comes late to a job that is over is told so."""
        self._cluster.listen(self._job.key, self)
        pods = self._pods()  # NB: of each of these it is heard from now on when it goes
        self._lost = {name for name, pod in pods.items() if self._is_judged(name, pod)}
        self.removing.update((name, time.monotonic()) for name in self._lost)
        self.state = replace(self.state, requested=len(pods) - len(self._lost), gone=frozenset(self._lost))
        self._doors.open(self._job.key, self._channels)
        try:
            for name in pods:
                self.pod_seen(name)
            self._tick()
            while True:
                self._handle(await self._events.get())
        finally:
            self._cluster.forget(self._job.key)
            if self._ticker is not None:
                self._ticker.cancel()

    async def close(self) -> None:
        """No worker can come in any more."""
        await self._doors.close(self._job.key, self._channels)

    def edit(self, spec: JobSpec) -> None:
        self._events.put_nowait(SpecChanged(spec))

    def give_back(self, worker: WorkerId, seconds: float) -> None:
        """The worker is to leave as soon as it can be spared."""
        self._events.put_nowait(PreemptionNotice(worker, seconds, wanted=True))

    def withdraw(self, count: int) -> None:
        """So many pods that are not wanted any more are not made."""
        self._handle(RequestsWithdrawn(count))

    @property
    def ending(self) -> bool:
        """Has the job ended, or been told to end?"""
        return self._interrupted or self.finish is not None

    def interrupt(self, reason: str, message: str, outcome: Outcome | None = None) -> None:
        self._interrupted = True
        self._events.put_nowait(Interrupted(outcome, reason, message))

    def send_away(self, reason: str, message: str) -> None:
        """The workers that are connected are told to stop."""
        for worker in self._channels.connected:
            self._channels.send(worker, Stop(reason=reason, message=message))

    def dismiss(self) -> None:
        """The end of the job is written down: its workers may go, and whoever comes late is told so.

        Before that they stay. An operator that dies in between finds them, and hears the same from them.
        """
        self._dismissed = True
        for farewell in self._farewells:
            self._channels.send(farewell.worker, farewell.message)
        self._farewells.clear()

    def _is_judged(self, name: WorkerId, pod: dict[str, Any]) -> bool:
        """Is it no worker of this training, or not any more?"""
        return name in self._job.judged or (not self._job.resumed and is_deleted(pod))

    # what the cluster says

    def pod_seen(self, name: str) -> None:
        pod = self._pods().get(name)
        if pod is None or name in self._lost:
            return
        signal = worker_signal(pod, self._cluster.node_of(pod), _now(), self._job.marks)
        if signal is None:
            if self._noticed.pop(name, None) is not None:
                self._events.put_nowait(NoticeWithdrawn(name))
        elif signal.kind is Kind.LOST:
            if name not in self.joined and _failed(pod):
                self.unborn.append((name, signal.message))
            self._gone(name, signal)
        else:
            self._notice(name, signal)

    def _notice(self, name: WorkerId, signal: Signal) -> None:
        """Tell of a notice if it is new, or shorter than was said before."""
        deadline, before = time.monotonic() + signal.seconds, self._noticed.get(name)
        if before is None:
            self.story.append(Emit(signal.source, f"{name}: {signal.message}", True))
            self._job.meter.signals[signal.source] += 1
        elif deadline > before - 1:
            return
        self._noticed[name] = deadline
        self._events.put_nowait(PreemptionNotice(name, signal.seconds))

    def pod_gone(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if owner_uid(pod) == self._job.uid:
            self._gone(name, pod_gone(name))

    def node_gone(self, pod: str, node: str) -> None:
        if pod in self._pods():
            self._gone(pod, node_gone(node))

    @property
    def queued(self) -> int:
        """Events that are not handled yet."""
        return self._events.qsize()

    def _gone(self, worker: WorkerId, signal: Signal) -> None:
        if worker not in self._lost:
            self._lost.add(worker)
            self._noticed.pop(worker, None)
            self._job.meter.signals[signal.source] += 1
            removed = worker in self.removed and signal.source == POD_DELETED
            self._events.put_nowait(WorkerLost(worker, signal.message, signal.exit_code, removed))
            self._wake()

    def _uid_of(self, worker: WorkerId) -> str | None:
        if worker in self._lost:
            return ""
        pod = self._pods().get(worker)
        return str(pod["metadata"].get("uid")) if pod else None

    def _pods(self) -> dict[str, dict[str, Any]]:
        return self._cluster.pods(self._job.key, self._job.uid)

    # the coordinator

    def _tick(self) -> None:
        """Now, and from time to time: it judges who was not heard, so it comes after what was heard before it."""
        now = time.monotonic()
        self._job.meter.late(now - self._due)
        if now - self._due > LATE_SECONDS:  # NB: the coordinator leaves that time out, and the clouds do not
            for worker, until in self._noticed.items():
                self._events.put_nowait(PreemptionNotice(worker, max(LEAST_SECONDS, until - now)))
        self._give_up(now)
        self._events.put_nowait(Tick())
        self._due = now + TICK_SECONDS
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _give_up(self, now: float) -> None:
        """Workers that have not joined, and whose notices the coordinator does not keep."""
        for worker in [w for w, until in self._noticed.items() if now > until + GIVEN_UP_SECONDS]:
            if worker not in self.state.workers and worker not in self.state.gone:
                self._gone(worker, notice_ended(worker))

    def _handle(self, event: Event) -> None:
        if isinstance(event, WorkerJoined):
            self.joined.add(event.hello.worker)
            event = WorkerJoined(self._placed(event.hello))
        before = self.state
        self.state, commands = coordinator.step(before, event, self._now())
        self._job.meter.handled(event, before, self.state)
        now = self.state
        figures = Figures(now.losses.get(now.step - 1), now.gradient_norm, now.learning_rate)
        self.record.follow(now.step, figures, now.takeovers)
        self.finish = next((c for c in commands if isinstance(c, Finish)), self.finish)
        for command in commands:
            self._execute(command)
        if isinstance(event, WorkerJoined):
            self._remind(event.hello.worker)
        if commands:
            self._wake()

    def _remind(self, worker: WorkerId) -> None:
        """The coordinator does not keep notices of workers that have not joined yet, or from before its restart."""
        record = self.state.workers.get(worker)
        if record is not None and record.notice_until is None and (until := self._noticed.get(worker)) is not None:
            self._events.put_nowait(PreemptionNotice(worker, max(LEAST_SECONDS, until - time.monotonic())))

    def _placed(self, hello: Hello) -> Hello:
        """With the zone of the worker's node: the worker itself does not know it."""
        pod = self._pods().get(hello.worker)
        node = self._cluster.node_of(pod) if pod else None
        zone = (node["metadata"].get("labels") or {}).get(self._job.spec.spread.topology_key) if node else None
        return msgspec.structs.replace(hello, zone=str(zone)) if zone else hello

    def _execute(self, command: Command) -> None:
        """NB: AddWorkers only wakes the hands; how many are wanted is in the state."""
        match command:
            case Send(worker, message):
                if self.finish is not None and not self._dismissed:
                    self._farewells.append(command)
                else:
                    self._channels.send(worker, message)
            case RemoveWorker(worker):
                self.removing.setdefault(worker, time.monotonic())
            case Emit(reason, message, warning):
                self.story.append(command)
                level = logging.WARNING if warning else logging.INFO
                logger.log(level, "%s/%s: %s: %s", *self._job.key, reason, message)
            case Finish(outcome):
                if outcome is Outcome.COMPLETE and (folder := self.state.save_path) is not None:
                    place = f"{folder.removeprefix(STORAGE_FOLDER)} of claim {claim_name(self._job.spec)}"
                    self.story.append(Emit("WeightsSaved", f"the final weights are in {place}"))


def known_lost(plan: str | None) -> frozenset[WorkerId]:
    """The lost workers in what `Brain.plan` gave."""
    lost = _kept(plan, "lost")
    return frozenset(name for name in lost if isinstance(name, str)) if isinstance(lost, list) else frozenset()


def known_task(plan: str | None) -> str | None:
    """The digest of the task in it."""
    digest = _kept(plan, "task")
    return digest if isinstance(digest, str) else None


def _kept(plan: str | None, name: str) -> Any:
    try:
        return json.loads(plan or "{}")[name]
    except (ValueError, KeyError, TypeError):
        return None


def _failed(pod: dict[str, Any]) -> bool:
    """Has it ended by itself, or was it refused by its node, and not taken away?"""
    status = pod.get("status") or {}
    taken = bool(pod["metadata"].get("deletionTimestamp")) or status.get("reason") in DISRUPTIONS
    return status.get("phase") in ("Failed", "Succeeded") and not taken


def _now() -> datetime:
    return datetime.now(UTC)
