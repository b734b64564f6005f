"""Disturbances of a simulated cluster by the job's user, the cloud and others."""

import asyncio
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from opsim_scenario import CRASHING, JOB, LONG_SECONDS, MISSING, Disturbance, DisturbanceKind
from opsim_server import Object

if TYPE_CHECKING:
    from opsim_simulation import OperatorSimulation

FOREGROUND_SECONDS = 60.0
LOSSES = (
    DisturbanceKind.DELETE_POD,
    DisturbanceKind.REMOVE_POD,
    DisturbanceKind.CRASH,
    DisturbanceKind.KILL,
    DisturbanceKind.VANISH,
    DisturbanceKind.TAKE,
    DisturbanceKind.HANG,
    DisturbanceKind.FREEZE,
)


class User:
    """The job's user and the cloud. harmed: whether a loss may have taken state without which the job fails."""

    def __init__(self, simulation: "OperatorSimulation") -> None:
        self._simulation, self._loop = simulation, simulation.loop
        self.harmed = False
        self._doomed: list[Object] = []  # pods that go
        self._healed = False
        self._returning: asyncio.Task[None] | None = None

    # what befalls the job

    def disturb(self, disturbance: Disturbance) -> None:
        self._simulation.log(f"DISTURBANCE {disturbance}")
        handlers: dict[DisturbanceKind, Callable[[Disturbance], None]] = {
            DisturbanceKind.SUSPEND: self._suspend,
            DisturbanceKind.SCALE: self._scale,
            DisturbanceKind.ROLL: self._roll,
            DisturbanceKind.BREAK: self._break,
            DisturbanceKind.RECREATE: self._recreate,
            DisturbanceKind.DROUGHT: self._drought,
            DisturbanceKind.QUOTA: self._quota,
            DisturbanceKind.API: self._api,
            DisturbanceKind.WATCH: self._watch,
            DisturbanceKind.OPERATOR: self._operator,
            DisturbanceKind.CHANNEL: self._channel,
            DisturbanceKind.MARK: self._lose,
            DisturbanceKind.ISOLATE: self._isolate,
            DisturbanceKind.CUT_OFF: self._cut_off,
            DisturbanceKind.PREEMPT: self._preempt,
            DisturbanceKind.STOP: self._stop,
            DisturbanceKind.UNQUEUE: self._unqueue,
            DisturbanceKind.KUEUE: self._kueue,
        }
        handlers.get(disturbance.kind, self._lose)(disturbance)

    async def heal(self) -> None:
        """End or await all disturbances but those of workers. Create a deleted job again, resume it, mend its spec."""
        self._simulation.log("all trouble is over")
        self._healed = True
        simulation, server = self._simulation, self._simulation.server
        server.trouble, server.slowness, server.room = 0.0, 1.0, 1000
        simulation.kubelets.full.clear()
        if simulation.queue is not None:
            simulation.queue.heal()
        if self._returning:
            await self._returning
        await asyncio.sleep(max(0.0, simulation.workers.reachable_at - self._loop.time()))
        while self._there() and "deletionTimestamp" in self._simulation.job["metadata"]:
            await asyncio.sleep(1.0)
        if not self._there():
            self.create()
        self.edit(lambda spec: spec.update(suspend=False))
        self.edit(self._mend)
        for watch in (simulation.pods, simulation.nodes, simulation.jobs):
            watch.list()

    def create(self) -> None:
        if not self._there():
            self._simulation.server.create("bamboojobs", self._simulation.scenario.manifest())

    def delete(self) -> None:
        if self._there():
            self._simulation.server.remove("bamboojobs", self._simulation.job)

    def _there(self) -> bool:
        return JOB in self._simulation.jobs.objects

    # the job

    def edit(self, change: Callable[[Object], None]) -> None:
        """Change the spec of the job, if the job exists. Raise metadata.generation only if the spec differs."""
        if not self._there():
            return
        job = self._simulation.job
        before = copy.deepcopy(job["spec"])
        change(job["spec"])
        if job["spec"] != before:
            job["metadata"]["generation"] += 1
            self._simulation.server.modified("bamboojobs", job)

    def _mend(self, spec: Object) -> None:
        whole = copy.deepcopy(self._simulation.scenario.manifest()["spec"])
        spec["training"], spec["task"] = whole["training"], whole["task"]
        if spec.get("worker", {}).get("image", "").startswith((MISSING, CRASHING)):
            spec["worker"] = {"image": "mended"}

    def _suspend(self, disturbance: Disturbance) -> None:
        self.edit(lambda spec: spec.update(suspend=True))
        self._later(disturbance, lambda: self.edit(lambda spec: spec.update(suspend=False)))

    def _scale(self, disturbance: Disturbance) -> None:
        scenario = self._simulation.scenario
        workers = scenario.arithmetic.stages * (1 + disturbance.number % scenario.most)
        self.edit(lambda spec: spec["elastic"].update(maxWorkers=workers))

    def _roll(self, disturbance: Disturbance) -> None:
        """Change the workers' image; in two of five cases to a broken one, which the user replaces later."""
        kind = (MISSING, CRASHING, "good", "good", "good")[disturbance.number % 5]

        def change(spec: Object) -> None:
            spec["worker"] = {"image": f"{kind}:{disturbance.number}"}

        self.edit(change)
        if kind != "good":
            self._later(disturbance, lambda: self.edit(self._mend))

    def _break(self, disturbance: Disturbance) -> None:
        """Make the job's manifest invalid or change its task, and mend it later; meanwhile the workers train on."""

        def change(spec: Object) -> None:
            if disturbance.number % 2:
                spec["training"]["microBatchSize"] = 7
            else:
                spec["task"]["config"] = {"renamed": 1}

        self.edit(change)
        self._later(disturbance, lambda: self.edit(self._mend))

    def _recreate(self, disturbance: Disturbance) -> None:
        """Delete the job and create it again. With foreground deletion (even numbers) its pods are deleted first,
        otherwise the garbage collector deletes them later.
        """
        if disturbance.number % 2 or not self._there():
            self.delete()
            self._loop.call_later(disturbance.seconds / 10, self.create)
            return
        job = self._simulation.job
        self._simulation.server.delete_in_foreground(job)
        for pod in self._simulation.pods_of(job):
            self._simulation.collect(pod)
        self._loop.call_later(
            0.5, self._finalize, job, self._loop.time() + FOREGROUND_SECONDS, disturbance.seconds / 10
        )

    def _finalize(self, job: Object, until: float, later: float) -> None:
        """Remove the job once it has no pods; after the time `until`, remove them. Then recreate it after `later` s."""
        left = self._simulation.pods_of(job)
        for pod in left if self._loop.time() > until else ():
            self._simulation.server.remove("pods", pod)
        for pod in left:
            if "deletionTimestamp" not in pod["metadata"]:  # made since
                self._simulation.collect(pod)
        if self._simulation.pods_of(job):
            self._loop.call_later(0.5, self._finalize, job, until, later)
            return
        self._simulation.server.remove("bamboojobs", job)
        self._loop.call_later(later, self.create)

    # the cluster

    def _drought(self, disturbance: Disturbance) -> None:
        self._simulation.kubelets.full.add("spot")
        self._later(disturbance, lambda: self._simulation.kubelets.full.discard("spot"))

    def _quota(self, disturbance: Disturbance) -> None:
        self._simulation.server.room = len(self._simulation.pods.objects)
        self._later(disturbance, lambda: setattr(self._simulation.server, "room", 1000))

    def _api(self, disturbance: Disturbance) -> None:
        server = self._simulation.server
        server.trouble, server.slowness = (
            (0.2, 0.5, 1.0)[disturbance.number % 3],
            (1.0, 10.0, 50.0)[disturbance.number // 3 % 3],
        )
        self._later(disturbance, lambda: (setattr(server, "trouble", 0.0), setattr(server, "slowness", 1.0)))

    def _watch(self, disturbance: Disturbance) -> None:
        simulation = self._simulation
        watches = [simulation.pods, simulation.nodes, simulation.jobs]
        watch = watches[disturbance.number % len(watches)]
        watch.interrupt(disturbance.seconds)

    # its queue

    def _preempt(self, disturbance: Disturbance) -> None:
        queue = self._simulation.queue
        assert queue is not None
        name = queue.compete(1 + disturbance.number % queue.manager.quota)
        self._later(disturbance, lambda: queue.withdraw(name))

    def _stop(self, disturbance: Disturbance) -> None:
        queue = self._simulation.queue
        assert queue is not None
        queue.manager.stopped = True
        self._later(disturbance, lambda: setattr(queue.manager, "stopped", False))

    def _unqueue(self, disturbance: Disturbance) -> None:
        queue = self._simulation.queue
        assert queue is not None
        if pods := self._simulation.living_pods():
            queue.forget(pods[disturbance.number % len(pods)])

    def _kueue(self, disturbance: Disturbance) -> None:
        queue = self._simulation.queue
        assert queue is not None
        queue.away = True
        self._later(disturbance, lambda: setattr(queue, "away", False))

    def _operator(self, disturbance: Disturbance) -> None:
        if self._returning is None or self._returning.done():
            self._returning = self._loop.create_task(self._restart(min(disturbance.seconds, 30.0)))

    def _isolate(self, disturbance: Disturbance) -> None:
        self._simulation.workers.reachable_at = self._loop.time() + LONG_SECONDS * (disturbance.number % 10) / 10
        self._operator(disturbance)

    def _cut_off(self, disturbance: Disturbance) -> None:
        """Cut all workers' channels, and let no worker connect until the disturbance ends."""
        self._simulation.workers.reachable_at = self._loop.time() + disturbance.seconds
        for node in self._simulation.workers.nodes.values():
            if node.alive:
                node.channel.cut(disturbance.seconds, self._simulation.rng.uniform(0.0, 1.0))

    async def _restart(self, seconds: float) -> None:
        await self._simulation.stop_operator()
        await asyncio.sleep(seconds)
        self._simulation.start_operator()

    # workers

    def _channel(self, disturbance: Disturbance) -> None:
        living = [node for node in self._simulation.workers.nodes.values() if node.alive]
        if living and self._may():
            living[disturbance.number % len(living)].channel.cut(
                min(disturbance.seconds, 1.5), self._simulation.rng.uniform(0.0, 1.0)
            )

    def _lose(self, disturbance: Disturbance) -> None:
        """Kill or freeze one worker, delete its pod, or taint, stop or take its node, if that is allowed now."""
        simulation, pods = self._simulation, self._simulation.living_pods()
        if not pods:
            return
        pod = pods[disturbance.number % len(pods)]
        if disturbance.kind in LOSSES and not self._is_free(pod) and not self._may():
            return
        simulation.log(f"it is {pod['metadata']['name']}")
        process = simulation.kubelets.processes.get(pod["metadata"]["uid"])
        if disturbance.kind in LOSSES:
            self._doomed.append(pod)
        match disturbance.kind:
            case DisturbanceKind.DELETE_POD:
                simulation.server.delete("pods", pod)
            case DisturbanceKind.REMOVE_POD:
                simulation.server.remove("pods", pod)
            case DisturbanceKind.CRASH | DisturbanceKind.KILL if process:
                process.end(1 if disturbance.kind is DisturbanceKind.CRASH else -9)
            case DisturbanceKind.VANISH:
                simulation.kubelets.vanish(pod)
            case DisturbanceKind.FREEZE if process:
                process.freeze(True)
                self._loop.call_later(disturbance.seconds, process.freeze, False)
            case DisturbanceKind.HANG:
                simulation.kubelets.hang(pod, 10 + disturbance.seconds)
            case DisturbanceKind.TAKE | DisturbanceKind.MARK:
                simulation.kubelets.take(pod, 10 + disturbance.seconds, stays=disturbance.kind is DisturbanceKind.MARK)

    def _is_free(self, pod: Object) -> bool:
        """Return whether the pod's worker never had a plan and is unknown to the coordinator, which must be running."""
        node, runner = self._simulation.workers.nodes.get(pod["metadata"]["uid"]), self._simulation.runner
        trained = node is not None and node.engine is not None and node.engine.components is not None
        return runner is not None and pod["metadata"]["name"] not in runner.state.workers and not trained

    def _may(self) -> bool:
        """Return whether a loss is allowed now, and set `harmed` if it may take state that the job needs.

        A loss is safe while the job runs and is protected, no earlier victim is left, and all channels stand: a worker
        whose channel is cut may be declared lost. Other losses are allowed unless the scenario is `careful`.
        """
        runner = self._simulation.runner
        safe = runner is not None and runner.state.phase == "Running" and not runner.status().unprotected
        if runner is not None and safe:
            known = runner.state.workers
            going = any(self._alive(pod) or pod["metadata"]["name"] in known for pod in self._doomed)
            here = [node for node in self._simulation.workers.nodes.values() if node.alive and node.name in known]
            safe = not going and all(node.channel.up and node.channel.open for node in here)
        if not safe and self._simulation.scenario.careful:
            return False
        self.harmed = self.harmed or not safe
        return True

    def _alive(self, pod: Object) -> bool:
        node = self._simulation.workers.nodes.get(pod["metadata"]["uid"])
        return node is not None and node.alive

    def _later(self, disturbance: Disturbance, end: Callable[[], object]) -> None:
        self._loop.call_later(disturbance.seconds, lambda: None if self._healed else end())
