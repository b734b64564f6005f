"""One simulated cluster with one BambooJob: the real operator on a simulated API server, and workers with real engines.

A run is a function of its scenario and of PYTHONHASHSEED (see operator_simulate.py).
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.events import WorkerState
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec, most_pipelines, wanted_workers
from bamboo_core.kube.api import KubeApi
from bamboo_operator.jobs import coordinator_runner, late_workers
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.coordinator_runner import CoordinatorRunner
from bamboo_operator.signals.signals import lives
from bamboo_operator.watch_handlers import watch_handlers
from opsim_budgets import disruptions_allowed
from opsim_kopf import KopfEvents, shared_for
from opsim_loop import VirtualLoop, virtual_time
from opsim_nodes import Nodes, Process
from opsim_queue import SimQueue
from opsim_scenario import JOB, MISSING, SPAN_SECONDS, ClusterScenario
from opsim_server import Object, Server, Watch
from opsim_user import User
from opsim_workers import SimChannels, Workers
from sim_arithmetic import Oracle
from sim_many import RunResult

REST_SECONDS = 700.0  # from the last trouble until all must be as it should: longer than a silent worker is waited for
END_SECONDS = 4000.0
TIDY_SECONDS = 120.0
ALONE_SECONDS = 40.0  # how long an operator may leave a running job without a coordinator


class Failure(AssertionError):
    """The end of a run that breaks a rule or takes too long. The message becomes the run's problem."""


class OperatorSimulation:
    """A run of a scenario. say: called with each line of the log."""

    def __init__(self, scenario: ClusterScenario, say: Callable[[str], None] | None = None) -> None:
        self.scenario, self._say = scenario, say
        self.loop = VirtualLoop(scenario.grid)
        rng = self.rng = random.Random(f"world {scenario.seed}")
        self.pods, self.nodes, self.jobs = (
            Watch(self.loop, rng, partial(self._show, kind)) for kind in ("pods", "nodes", "bamboojobs")
        )
        watches = {"pods": self.pods, "nodes": self.nodes, "bamboojobs": self.jobs}
        self.server = Server(self.loop, rng, watches, self._changed, self._called)
        self.kubelets = Nodes(self.loop, rng, self.server, self.nodes, self._start)
        quota = wanted_workers(parse_manifest(scenario.manifest())) if scenario.queued else None
        self.queue = None if quota is None else SimQueue(self, quota)
        if self.queue is not None:
            self.server.admission = self.queue.admit
        self.workers = Workers(
            self.loop, rng, Oracle(scenario.arithmetic), JOB, scenario.slowdown, scenario.work, self.fail
        )
        self.controller: JobController | None = None
        self.failure: str | None = None
        self.kind = "None"

    def run(self) -> RunResult:
        handler = _Alarm(self)
        logs = [logging.getLogger(name) for name in ("bamboo_operator", "bamboo_core", "bamboo_trainer", "asyncio")]
        levels = [log.level for log in logs]
        for log in logs:
            log.addHandler(handler)
            log.setLevel(logging.INFO)
        try:
            with (
                virtual_time(self.loop),
                patch.object(coordinator_runner, "Channels", SimChannels),
                patch.object(late_workers, "Channels", SimChannels),
                asyncio.Runner(loop_factory=lambda: self.loop) as runner,
            ):
                runner.run(self._run())
        except (Failure, AssertionError) as error:
            self.fail(str(error) or repr(error))
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.removeHandler(handler)
                log.setLevel(level)
        return RunResult(seed=self.scenario.seed, kind=self.kind, problem=self.failure, seconds=self.loop.time())

    def log(self, text: str) -> None:
        if self._say:
            self._say(f"{self.loop.time():10.3f}  {text}")

    def fail(self, text: str) -> None:
        self.log(f"FAILURE: {text}")
        self.failure = self.failure or text

    # the course of things

    async def _run(self) -> None:
        self.loop.set_exception_handler(self._raised)
        user = User(self)
        user.create()
        self.start_operator()
        admitting = None if self.queue is None else self.loop.create_task(self.queue.run())
        try:
            for disturbance in self.scenario.disturbances:
                self.loop.call_at(disturbance.at, user.disturb, disturbance)
            await self._watch(SPAN_SECONDS)
            await user.heal()
            await self._until(self._at_rest, REST_SECONDS)
            await self._until(self._over, END_SECONDS)
            self._judge(user)
            await self._until(lambda: self._left("pods"), TIDY_SECONDS)
            user.delete()
            await self._until(
                lambda: self._left("pods", "processes", "reconcilers", "gateway", "listeners"), TIDY_SECONDS
            )
        finally:
            if admitting is not None:
                admitting.cancel()
                await asyncio.gather(admitting, return_exceptions=True)
            await self.stop_operator()

    async def _watch(self, seconds: float) -> None:
        """Wait, and check the queue. Raises Failure if an operator runs no coordinator of a job for ALONE_SECONDS."""
        end, since = self.loop.time() + seconds, self.loop.time()
        while self.loop.time() < end:
            await asyncio.sleep(1.0)
            job = self.jobs.objects.get(JOB)
            left = job is not None and (job.get("status") or {}).get("plan") and not job["spec"].get("suspend")
            left = left and "deletionTimestamp" not in job["metadata"]
            if self.runner is not None or self.controller is None or not left or self.server.trouble or self._ends():
                since = self.loop.time()
            if self.queue is not None:
                self.queue.judge()
            if self.loop.time() - since > ALONE_SECONDS:
                raise Failure(f"the workers have been left alone for {ALONE_SECONDS:g} s")

    async def _until(self, problem: Callable[[], str | None], seconds: float) -> None:
        """Wait until `problem` returns None three times in a row. Raises Failure after `seconds` or a failed check."""
        end, good = self.loop.time() + seconds, 0
        while good < 3:
            if self.failure:
                raise Failure(self.failure)
            good = good + 1 if (found := problem()) is None else 0
            if self.loop.time() > end:
                raise Failure(f"after {seconds:g} s: {found}")
            await asyncio.sleep(1.0)

    def _at_rest(self) -> str | None:
        """Describe what differs from the job's spec or is under way; return None if nothing does or the job is over."""
        if self._over() is None:
            return None
        runner, living = self.runner, self.living_pods()
        if runner is None:
            return "the operator has no coordinator for the job"
        state, status = runner.state, runner.status()
        facts = {
            "phase": (state.phase, "Running"),
            "pods": (len(living), wanted_workers(state.spec)),
            "workers": (len(state.workers), wanted_workers(state.spec)),
            "requested": (state.membership.requested, 0),
            "grid": (len(status.grid) in self._allowed_pipelines(state.spec), True),
            "unprotected": (len(status.unprotected), 0),
            "known": (
                set(self._cluster.known_pods()),
                {pod["metadata"]["uid"] for pod in self.pods.objects.values()},
            ),
            "spec": (state.spec.elastic.max_workers, self.job["spec"]["elastic"]["maxWorkers"]),
        }
        if self.queue is not None:
            facts["lacks quota"] = (self.queue.lacking(), 0)
        conditions = (self.job.get("status") or {}).get("conditions") or ()
        rollout = next((one["reason"] for one in conditions if one["type"] == "WorkersUpdated"), None)
        if rollout != "RolloutStalled":  # because new workers are lost again and again
            images = {pod["spec"]["containers"][0]["image"] for pod in living}
            facts["images"] = (images, {self.job["spec"].get("worker", {}).get("image", "trainer")})
            facts["rollout"] = (rollout, "WorkersUpdated")
        wrong = [f"{name} {got}, not {want}" for name, (got, want) in facts.items() if got != want]
        return "; ".join(wrong) or None

    def _allowed_pipelines(self, spec: JobSpec) -> range:
        """Return the numbers of pipelines allowed at rest: the maximum, or any up to it if the coordinator chooses."""
        most = most_pipelines(spec)
        return range(1 if self.scenario.chooses else most, most + 1)

    def _over(self) -> str | None:
        return None if self._ends() else f"the job is not over: {self._conditions()}"

    def _ends(self) -> list[Object]:
        return [c for c in self._conditions() if c["type"] in ("Complete", "Failed") and c["status"] == "True"]

    def _conditions(self) -> list[Object]:
        found: list[Object] = (self.job.get("status") or {}).get("conditions") or []
        return found

    def _judge(self, user: User) -> None:
        end = self._ends()[0]
        self.kind = f"{end['type']} {end['reason']}"
        if end["type"] == "Complete":
            found, digests = self.job["status"]["digests"], self.workers.oracle.digests
            if add_digests(found) != add_digests(digests):  # of stages, and of layers
                raise Failure(f"the stages ended with {found}, and the layers should have with {digests}")
        elif not user.harmed:
            raise Failure(f"the job failed though nothing was taken that it needs: {end}")
        elif end["reason"] not in ("StageLost", "WorkersGone"):
            raise Failure(f"the job failed: {end}")

    def _left(self, *kinds: str) -> str | None:
        left = {
            "pods": sorted(p["metadata"]["name"] for p in self.living_pods() if not never_starts(p)),
            "processes": sorted(node.name for node in self.workers.nodes.values() if node.alive),
            "reconcilers": [str(job.key) for job in self.controller.running()] if self.controller else [],
            "gateway": bool(self.workers.gateway and self.workers.gateway.channels_of(JOB)),
            "listeners": self._cluster.listener_of(JOB) is not None,
        }
        return next((f"{kind} are left: {left[kind]}" for kind in kinds if left[kind]), None)

    # what there is

    @property
    def job(self) -> Object:
        return self.jobs.objects[JOB]

    @property
    def runner(self) -> CoordinatorRunner | None:
        jobs = self.controller.running() if self.controller else ()
        return next((job.runner for job in jobs if job.key == JOB), None)

    def living_pods(self) -> list[Object]:
        return [pod for pod in self.pods.objects.values() if lives(pod)]

    # the operator

    def start_operator(self) -> None:
        """Start an operator as kopf does: it knows pods and nodes before the first job."""
        self.log("the operator starts")
        self.shared = shared_for(KubeApi(self.server))
        self._cluster = self.shared.cluster
        self.controller, self.workers.gateway = JobController(self.shared), self.shared.gateway
        self.controller.start()
        self._events = KopfEvents(watch_handlers(self.controller, self.shared), self._cluster)
        for kind, watch in (("nodes", self.nodes), ("pods", self.pods)):
            watch.listening = True
            for thing in list(watch.objects.values()):
                self._show(kind, None, thing)
        self.jobs.list()

    async def stop_operator(self) -> None:
        self.log("the operator ends")
        ended, self.controller, self.workers.gateway = self.controller, None, None
        self.server.names.clear()
        for watch in (self.pods, self.nodes, self.jobs):
            watch.forget()
        if ended:
            await ended.stop()

    def _show(self, what: str, kind: str | None, thing: Object) -> None:
        if self.controller:
            self._events.show(what, kind, thing)

    # the cluster

    def _called(self, method: str, place: str) -> None:
        """Fail the run if the operator deletes a training worker's pod, unless the job has ended or was interrupted."""
        runner, (_, kind, name) = self.runner, place.rsplit("/", 2)
        if runner is None or runner.ending or (method, kind) != ("DELETE", "pods"):
            return
        pod = self.pods.objects.get((JOB[0], name))
        if pod and lives(pod) and dict(runner.status().workers).get(name) is WorkerState.TRAINING:
            self.fail(f"{name} trains, and its pod is deleted")

    def _changed(self, what: str, thing: Object) -> None:
        metadata = thing["metadata"]
        if what != "bamboojobs MODIFIED":
            self.log(f"{what}: {metadata['name']} ({metadata['uid']}) {(thing.get('status') or {}).get('phase', '')}")
        for name, budget in self.server.budgets.items():
            if (allowed := disruptions_allowed(budget, self.pods.objects.values())) > 1:
                self.fail(f"{name} lets {allowed} workers go at once")
        match what:
            case "pods ADDED":
                self.kubelets.created(thing)
                owners = {job["metadata"]["uid"] for job in self.jobs.objects.values()}
                if metadata["ownerReferences"][0]["uid"] not in owners:
                    self.collect(thing)
            case "pods MODIFIED":
                self.kubelets.modified(thing)
            case "pods DELETED":
                self.kubelets.deleted(thing)
            case "bamboojobs DELETED":
                for pod in self.pods_of(thing):
                    self.collect(pod)

    def pods_of(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [pod for pod in self.pods.objects.values() if pod["metadata"]["ownerReferences"][0]["uid"] == uid]

    def collect(self, pod: Object) -> None:
        """Delete a pod whose owner is gone or being deleted, within 3 s, as the garbage collector does."""
        self.loop.call_later(self.rng.uniform(0.0, 3.0), self.server.delete, "pods", pod)

    def _start(self, pod: Object) -> Process:
        return self.workers.start(pod, partial(self._ended, pod))

    def _ended(self, pod: Object, code: int | None) -> None:
        self.log(f"{pod['metadata']['name']} has ended with {code}")
        self.kubelets.ended(pod, code)

    def _raised(self, loop: Any, context: dict[str, Any]) -> None:
        self.fail(f"{context.get('message')}: {context.get('exception')!r}")


def never_starts(pod: Object) -> bool:
    """Return whether the pod's image is missing, so that the pod stays pending until it is deleted."""
    return str(pod["spec"]["containers"][0]["image"]).startswith(MISSING)


class _Alarm(logging.Handler):
    """A log handler that writes to the run's log, and fails the run when the product or asyncio logs an error."""

    def __init__(self, simulation: OperatorSimulation) -> None:
        super().__init__(logging.INFO)
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        self._simulation.log(f"{record.name}: {record.getMessage()}")
        if record.levelno >= logging.ERROR:
            self._simulation.fail(f"the product says: {record.getMessage()}")
