"""Many jobs at a slow API server, in virtual time: statuses, bursts of preemptions, idle jobs, stuck reconciliation."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from bamboo_core.kube.api import KubeApi
from bamboo_core.names import LABEL_JOB_NAME, TRAINER_CONTAINER
from bamboo_operator.jobs import coordinator_runner as runner_module
from bamboo_operator.jobs import reconciler
from bamboo_operator.jobs.controller import STUCK_SECONDS, JobController
from bamboo_operator.jobs.reconcile_schedule import CALM_SECONDS, QUIET_SECONDS, Burst
from bamboo_operator.jobs.reconcile_schedule import LONGEST_SECONDS as LONGEST_BURST
from bamboo_operator.jobs.reconciler import LONGEST_SECONDS
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.pods.controller import PodController
from bamboo_operator.watch_handlers import watch_handlers
from manifest_kit import bamboojob, training
from opsim_kopf import KopfEvents, shared_for
from opsim_loop import VirtualLoop, virtual_time
from opsim_server import Object, Server, Watch

JOBS, WORKERS = 30, 8
SLOWNESS = 60.0  # a call takes 0.8 s on average
PULL_SECONDS = 10.0
BACKOFF_SECONDS = 20.0
IMAGE = "registry.invalid/no-such-image:1"
ERROR = f'failed to pull and unpack image "{IMAGE}": not found'


def manifest(name: str) -> Object:
    return bamboojob(
        name,
        namespace="default",
        task={"entrypoint": "stand.in:build"},
        training=training(10, 8, 1),
        topology={"stages": WORKERS // 2, "pipelines": 2},
        worker={"image": IMAGE},
    )


def suspended(document: Object) -> Object:
    return {**document, "spec": {**document["spec"], "suspend": True}}


def late_pod(job: str, uid: str) -> Object:
    owner = {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "name": job, "uid": uid, "controller": True}
    metadata = {
        "name": f"{job}-w9",
        "namespace": "default",
        "labels": {LABEL_JOB_NAME: job},
        "ownerReferences": [owner],
        "uid": f"{job}-w9",
    }
    return {"metadata": metadata, "spec": {"containers": [{"name": TRAINER_CONTAINER}]}, "status": {}}


class ManyJobs:
    """A simulation of many jobs, created at once, whose image no node can pull. stuck: liveness problems.

    refused, told: virtual seconds at which a pod's and the job's status first showed the failure, by job.
    """

    def __init__(self, loop: VirtualLoop, slowness: float = SLOWNESS, *, suspended: bool = False) -> None:
        rng = random.Random(1)
        self._loop, self._suspended = loop, suspended
        self.pods: list[tuple[str, float]] = []  # what happened to pods, and when
        self.made: Counter[str] = Counter()
        self.first: float | None = None  # when the first pod was made
        self.stuck: list[str] = []
        self.refused: dict[str, float] = {}
        self.told: dict[str, float] = {}
        self.writes = 0
        self._jobs_made: list[Object] = []
        self._pods, self._jobs = (Watch(loop, rng, partial(self._show, kind)) for kind in ("pods", "bamboojobs"))
        watches = {"pods": self._pods, "nodes": Watch(loop, rng, lambda *_: None), "bamboojobs": self._jobs}
        self._server = Server(loop, rng, watches, self._changed)
        self._server.slowness = slowness
        shared = shared_for(KubeApi(self._server))
        self.burst = shared.burst
        self._controller = JobController(shared)
        self._events = KopfEvents(watch_handlers(self._controller, shared), shared.cluster)

    async def run(self, jobs: int, seconds: float) -> None:
        self._pods.listening = self._jobs.listening = True
        for number in range(jobs):
            made = manifest(f"job-{number:02}")
            self._jobs_made.append(self._server.create("bamboojobs", suspended(made) if self._suspended else made))
        try:
            while self._loop.time() < seconds and not self.stuck:
                await asyncio.sleep(10.0)
                self.stuck += filter(None, [self._controller.stuck()])
        finally:
            await self._controller.stop()

    def bring_late_pod(self, name: str) -> None:
        """Add a pod whose creation by an earlier operator was delayed."""
        (uid,) = [job["metadata"]["uid"] for job in self._jobs_made if job["metadata"]["name"] == name]
        self._server.create("pods", late_pod(name, uid))

    def _show(self, what: str, kind: str | None, thing: Object) -> None:
        self._events.show(what, kind, thing)

    def _changed(self, what: str, thing: Object) -> None:
        name = thing["metadata"]["name"]
        if what.startswith("pods "):
            self.pods.append((what.removeprefix("pods "), self._loop.time()))
        if what == "pods ADDED" and not self._suspended:
            self.made[thing["metadata"]["labels"][LABEL_JOB_NAME]] += 1
            self.first = self._loop.time() if self.first is None else self.first
            thing["spec"]["nodeName"] = "node"
            self._loop.call_later(PULL_SECONDS, self._refuse, thing, 0)
        elif what == "bamboojobs MODIFIED":
            self.writes += 1
            conditions = {c["type"]: c for c in thing["status"]["conditions"]}
            if conditions["WorkersReady"]["reason"] == "ImagePullBackOff":
                self.told.setdefault(name, self._loop.time())

    def _refuse(self, pod: Object, count: int) -> None:
        """Report a failed image pull as a kubelet does: ErrImagePull and ImagePullBackOff, in turn."""
        pulled = f"ErrImagePull: {ERROR}"
        reason, message = (
            ("ImagePullBackOff", f'Back-off pulling image "{IMAGE}": {pulled}')
            if count % 2
            else ("ErrImagePull", ERROR)
        )
        waiting = {"reason": reason, "message": message}
        container = {"name": TRAINER_CONTAINER, "image": IMAGE, "state": {"waiting": waiting}}
        pod["status"] = {"phase": "Pending", "containerStatuses": [container]}
        self._server.modified("pods", pod)
        self.refused.setdefault(pod["metadata"]["labels"][LABEL_JOB_NAME], self._loop.time())
        self._loop.call_later(BACKOFF_SECONDS, self._refuse, pod, count + 1)


@contextmanager
def virtual_runner(patch: pytest.MonkeyPatch) -> Iterator[tuple[asyncio.Runner, VirtualLoop]]:
    loop = VirtualLoop(0.0)
    patch.setattr(runner_module, "TICK_SECONDS", 1.0)  # no worker is there that could be late
    with virtual_time(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
        yield runner, loop


LIFE_SECONDS = 200.0
MOST_WRITES = 8  # of a job's status in LIFE_SECONDS, in which the kubelet reports about nine states of each pod
SOON = 12.0  # 30 writes of 0.8 s, four at a time, and a look every 2 s


def test_the_status_tells_soon_why_pods_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator does not rewrite a status each time that a kubelet alternates between back-off and a new pull."""
    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop)
        runner.run(simulated.run(JOBS, LIFE_SECONDS))
    assert simulated.made == dict.fromkeys(simulated.refused, WORKERS)
    assert len(simulated.made) == JOBS
    lags = sorted(simulated.told.get(name, LIFE_SECONDS) - at for name, at in simulated.refused.items())
    assert lags[-1] < SOON, f"median {lags[JOBS // 2]:.1f} s, at most {lags[-1]:.1f} s"
    assert simulated.writes < MOST_WRITES * JOBS
    assert simulated.stuck == [], "a job that waits for others is not stuck"


async def notices(burst: Burst, loop: VirtualLoop, seconds: float) -> None:
    while loop.time() < seconds:
        burst.noticed()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("seconds", "first"), [(1.5, 1.4 + CALM_SECONDS), (60.0, LONGEST_BURST)])
def test_while_workers_are_taken_away_decisions_come_first(
    monkeypatch: pytest.MonkeyPatch, seconds: float, first: float
) -> None:
    """The operator creates pods after a short burst of preemptions, but does not wait for the end of a long one."""

    async def both(simulated: ManyJobs, loop: VirtualLoop) -> None:
        await asyncio.gather(simulated.run(JOBS, 10.0), notices(simulated.burst, loop, seconds))

    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop, slowness=0.1)
        runner.run(both(simulated, loop))
    assert simulated.first is not None
    assert first <= simulated.first < first + 1
    assert simulated.made == {f"job-{number:02}": WORKERS for number in range(JOBS)}


IDLE_SECONDS = 900.0


def test_idle_jobs_are_looked_at_only_when_something_happens_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator reconciles suspended jobs about once in QUIET_SECONDS, but soon removes a pod that appears late."""
    looks: Counter[str] = Counter()

    class Counted(ApiAttempts):
        def __init__(self, key: JobKey) -> None:
            super().__init__(key)
            self.name = key[1]

        def heartbeat(self) -> None:
            looks[self.name] += 1
            super().heartbeat()

    monkeypatch.setattr(reconciler, "ApiAttempts", Counted)
    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop, slowness=1.0, suspended=True)
        loop.call_later(0.45 * IDLE_SECONDS, simulated.bring_late_pod, "job-00")
        runner.run(simulated.run(JOBS, IDLE_SECONDS))
        removed = [at for what, at in simulated.pods if what == "DELETED"]
    assert simulated.stuck == []
    assert [int(at - 0.45 * IDLE_SECONDS) < QUIET_SECONDS / 10 for at in removed] == [True]
    quiet = [looks[f"job-{number:02}"] for number in range(1, JOBS)]
    assert max(quiet) <= 2 * (IDLE_SECONDS / QUIET_SECONDS + 4), "twice at each look"


def test_a_reconciliation_that_is_stuck_is_reported_though_the_status_is_written_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stand_still(_: PodController) -> None:
        await asyncio.sleep(3600.0)

    monkeypatch.setattr(PodController, "reconcile", stand_still)
    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop)
        runner.run(simulated.run(1, 2 * (LONGEST_SECONDS + STUCK_SECONDS)))
    assert simulated.stuck[0].startswith("no reconciliation of default/job-00 for ")
