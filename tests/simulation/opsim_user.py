"""Who acts in a simulated cluster: the job's user, the cloud, and whatever else befalls it."""

import asyncio
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from opsim_acts import JOB, LONG_SECONDS, Act, What
from opsim_server import Object

if TYPE_CHECKING:
    from opsim_world import World

FOREGROUND_SECONDS = 60.0
LOSSES = (What.DELETE_POD, What.REMOVE_POD, What.CRASH, What.KILL, What.VANISH, What.TAKE, What.HANG, What.FREEZE)


class User:
    """harmed: something was taken without care, so that the job may not be able to go on."""

    def __init__(self, world: "World") -> None:
        self._world, self._loop = world, world.loop
        self.harmed = False
        self._doomed: list[Object] = []  # pods that go
        self._healed = False
        self._stopping = False
        self._returning: asyncio.Task[None] | None = None

    # acts

    def act(self, act: Act) -> None:
        self._world.log(f"ACT {act}")
        acts: dict[What, Callable[[Act], None]] = {
            What.SUSPEND: self._suspend, What.SCALE: self._scale, What.BREAK: self._break,
            What.RECREATE: self._recreate, What.DROUGHT: self._drought, What.QUOTA: self._quota, What.API: self._api,
            What.WATCH: self._watch, What.OPERATOR: self._operator, What.CHANNEL: self._channel, What.MARK: self._lose,
            What.ISOLATE: self._isolate, What.CUT_OFF: self._cut_off,
        }  # fmt: skip
        acts.get(act.what, self._lose)(act)

    async def heal(self) -> None:
        """All trouble is over; what is still to come, such as a node's end, comes."""
        self._world.log("all trouble is over")
        self._healed = True
        world, server = self._world, self._world.server
        server.trouble, server.slowness, server.room = 0.0, 1.0, 1000
        world.kubelets.full.clear()
        if self._returning:
            await self._returning
        await asyncio.sleep(max(0.0, world.workers.reachable_at - self._loop.time()))
        while self._there() and "deletionTimestamp" in self._world.job["metadata"]:
            await asyncio.sleep(1.0)
        if not self._there():
            self.create()
        self._edit(lambda spec: spec.update(suspend=False))
        self._edit(self._mend)
        for watch in (world.pods, world.nodes, world.jobs):
            watch.list()

    def create(self) -> None:
        if not self._there():
            self._world.server.create("bamboojobs", self._world.story.manifest())

    def delete(self) -> None:
        if self._there():
            self._world.server.remove("bamboojobs", self._world.job)

    def _there(self) -> bool:
        return JOB in self._world.jobs.objects

    # the job

    def _edit(self, change: Callable[[Object], None]) -> None:
        """What changes nothing makes no generation."""
        if not self._there():
            return
        job = self._world.job
        before = copy.deepcopy(job["spec"])
        change(job["spec"])
        if job["spec"] != before:
            job["metadata"]["generation"] += 1
            self._world.server.modified("bamboojobs", job)

    def _mend(self, spec: Object) -> None:
        whole = copy.deepcopy(self._world.story.manifest()["spec"])
        spec["training"], spec["task"] = whole["training"], whole["task"]

    def _suspend(self, act: Act) -> None:
        self._edit(lambda spec: spec.update(suspend=True))
        self._later(act, lambda: self._edit(lambda spec: spec.update(suspend=False)))

    def _scale(self, act: Act) -> None:
        least, most = sorted((1 + act.number % self._world.story.most, 1 + act.number // 2 % self._world.story.most))

        def change(spec: Object) -> None:
            spec["topology"]["pipelines"] = least
            spec["elastic"]["maxPipelines"] = most

        self._edit(change)

    def _break(self, act: Act) -> None:
        """So that nobody can read it, or so that it is another task: its workers train on, and are looked after."""

        def change(spec: Object) -> None:
            if act.number % 2:
                spec["training"]["microBatchSize"] = 7
            else:
                spec["task"]["config"] = {"renamed": 1}

        self._edit(change)
        self._later(act, lambda: self._edit(self._mend))

    def _recreate(self, act: Act) -> None:
        """By the garbage collector in the background, or before the job itself is gone."""
        if act.number % 2 or not self._there():
            self.delete()
            self._loop.call_later(act.seconds / 10, self.create)
            return
        job = self._world.job
        self._world.server.delete_in_foreground(job)
        for pod in self._world.pods_of(job):
            self._world.collect(pod)
        self._loop.call_later(0.5, self._finalize, job, self._loop.time() + FOREGROUND_SECONDS, act.seconds / 10)

    def _finalize(self, job: Object, until: float, later: float) -> None:
        """Of a node that hangs somebody takes the pods away in the end."""
        left = self._world.pods_of(job)
        for pod in left if self._loop.time() > until else ():
            self._world.server.remove("pods", pod)
        for pod in left:
            if "deletionTimestamp" not in pod["metadata"]:  # made since
                self._world.collect(pod)
        if self._world.pods_of(job):
            self._loop.call_later(0.5, self._finalize, job, until, later)
            return
        self._world.server.remove("bamboojobs", job)
        self._loop.call_later(later, self.create)

    # the cluster

    def _drought(self, act: Act) -> None:
        self._world.kubelets.full.add("spot")
        self._later(act, lambda: self._world.kubelets.full.discard("spot"))

    def _quota(self, act: Act) -> None:
        self._world.server.room = len(self._world.pods.objects)
        self._later(act, lambda: setattr(self._world.server, "room", 1000))

    def _api(self, act: Act) -> None:
        server = self._world.server
        server.trouble, server.slowness = (0.2, 0.5, 1.0)[act.number % 3], (1.0, 10.0, 50.0)[act.number // 3 % 3]
        self._later(act, lambda: (setattr(server, "trouble", 0.0), setattr(server, "slowness", 1.0)))

    def _watch(self, act: Act) -> None:
        world = self._world
        watch = (world.pods, world.nodes, world.jobs)[act.number % 3]
        watch.interrupt(act.seconds)

    def _operator(self, act: Act) -> None:
        if self._returning is None or self._returning.done():
            self._returning = self._loop.create_task(self._restart(min(act.seconds, 30.0)))

    def _isolate(self, act: Act) -> None:
        self._world.workers.reachable_at = self._loop.time() + LONG_SECONDS * (act.number % 10) / 10
        self._operator(act)

    def _cut_off(self, act: Act) -> None:
        """One channel after the other."""
        self._world.workers.reachable_at = self._loop.time() + act.seconds
        for node in self._world.workers.nodes.values():
            if node.alive:
                node.channel.cut(act.seconds, self._world.rng.uniform(0.0, 1.0))

    async def _restart(self, seconds: float) -> None:
        await self._world.stop_operator()
        await asyncio.sleep(seconds)
        self._world.start_operator()

    # workers

    def _channel(self, act: Act) -> None:
        living = [node for node in self._world.workers.nodes.values() if node.alive]
        if living and self._may():
            living[act.number % len(living)].channel.cut(min(act.seconds, 1.5), self._world.rng.uniform(0.0, 1.0))

    def _lose(self, act: Act) -> None:
        """A worker, or only its peace of mind."""
        world, pods = self._world, self._world.living_pods()
        if not pods:
            return
        pod = pods[act.number % len(pods)]
        if act.what in LOSSES and not self._is_free(pod) and not self._may():
            return
        world.log(f"it is {pod['metadata']['name']}")
        process = world.kubelets.processes.get(pod["metadata"]["uid"])
        if act.what in LOSSES:
            self._doomed.append(pod)
        match act.what:
            case What.DELETE_POD:
                world.server.delete("pods", pod)
            case What.REMOVE_POD:
                world.server.remove("pods", pod)
            case What.CRASH | What.KILL if process:
                process.end(1 if act.what is What.CRASH else -9)
            case What.VANISH:
                world.kubelets.vanish(pod)
            case What.FREEZE if process:
                process.freeze(True)
                self._loop.call_later(act.seconds, process.freeze, False)
            case What.HANG:
                world.kubelets.hang(pod, 10 + act.seconds)
            case What.TAKE | What.MARK:
                world.kubelets.take(pod, 10 + act.seconds, stays=act.what is What.MARK)

    def _is_free(self, pod: Object) -> bool:
        """Does it hold nothing that anybody needs?"""
        node, runner = self._world.workers.nodes.get(pod["metadata"]["uid"]), self._world.runner
        trained = node is not None and node.engine is not None and node.engine.components is not None
        return runner is not None and pod["metadata"]["name"] not in runner.state.workers and not trained

    def _may(self) -> bool:
        """A worker whose channel is cut may be declared lost, if the API server does not vouch for it in time."""
        runner = self._world.runner
        safe = runner is not None and runner.state.phase == "Running" and not runner.status().unprotected
        if runner is not None and safe:
            known = runner.state.workers
            going = any(self._alive(pod) or pod["metadata"]["name"] in known for pod in self._doomed)
            here = [node for node in self._world.workers.nodes.values() if node.alive and node.name in known]
            safe = not going and all(node.channel.up and node.channel.open for node in here)
        if not safe and self._world.story.careful:
            return False
        self.harmed = self.harmed or not safe
        return True

    def _alive(self, pod: Object) -> bool:
        node = self._world.workers.nodes.get(pod["metadata"]["uid"])
        return node is not None and node.alive

    def _later(self, act: Act, end: Callable[[], object]) -> None:
        self._loop.call_later(act.seconds, lambda: None if self._healed else end())
