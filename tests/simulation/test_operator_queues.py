"""Jobs in a queue of Kueue with too little quota, in virtual time: pods are admitted and preempted one by one."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bamboo_core.control.digests import add_digests
from bamboo_core.names import LABEL_JOB_NAME, LABEL_WORKER_INDEX
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.signals.signals import lives
from kueue_manager import holds_quota, waits
from opsim_nodes import Process
from opsim_scenario import ClusterScenario, scenario
from opsim_server import Object
from opsim_simulation import Failure, OperatorSimulation
from opsim_workers import Workers
from sim_arithmetic import Oracle

FIRST = {"name": "queue", "priorityClass": "needed", "growthPriorityClass": "growth"}
IMPORTANT = {"name": "queue", "priorityClass": "urgent"}
CLASSES = {"urgent": 100, "needed": 10, "growth": 1}


def of_two_stages(seed: int, *, steps: int, **changes: Any) -> ClusterScenario:
    """Return a scenario with a job of one to `most` pipelines of two stages; a step takes a few seconds."""
    made = scenario(seed, queued=True)
    sizes = {"stages": 2, "pipelines": 1, "microbatches": 4, "steps": steps, "sizes": (1,) * 6, "groups": 2}
    arithmetic = replace(made.arithmetic, **sizes)
    still = {"pools": (), "most": 1, "standby": 0, "disturbances": (), "slowdown": 60.0}
    return replace(made, arithmetic=arithmetic, mode="Replicas", **{**still, **changes})


class Queued(OperatorSimulation):
    """A simulation of jobs in one Kueue queue. jobs: scenario and section `queue`, by name. quota: in workers."""

    def __init__(self, jobs: Mapping[str, tuple[ClusterScenario, Object]], quota: int) -> None:
        self.keys = {name: ("default", name) for name in jobs}
        super().__init__(next(iter(jobs.values()))[0])
        assert self.queue is not None
        self.manager = self.queue.manager
        self.manager.quota, self.manager.classes = quota, CLASSES
        self.asked = dict(jobs)
        self.crews = {name: self._crew(self.keys[name], of) for name, (of, _) in jobs.items()}

    def _crew(self, key: JobKey, of: ClusterScenario) -> Workers:
        return Workers(self.loop, self.rng, Oracle(of.arithmetic), key, of.slowdown, of.work, self.fail)

    def _start(self, pod: Object) -> Process:
        return self.crews[pod["metadata"]["labels"][LABEL_JOB_NAME]].start(pod, partial(self._ended, pod))

    def start_operator(self) -> None:
        super().start_operator()
        for crew in self.crews.values():
            crew.gateway = self.workers.gateway

    def make(self, *names: str) -> None:
        for name in names:
            of, queue = self.asked[name]
            manifest = of.manifest()
            manifest["spec"] |= {"queue": queue, "checkpoint": {"storage": f"memory://{name}"}}
            self.server.create("bamboojobs", {**manifest, "metadata": {"name": name, "namespace": "default"}})

    def holding(self) -> dict[str, int]:
        """Return the number of workers with quota, by job."""
        pods = (pod for pod in self.pods.objects.values() if holds_quota(pod))
        return dict(Counter(pod["metadata"]["labels"][LABEL_JOB_NAME] for pod in pods))

    def waiting(self) -> dict[str, int]:
        pods = (pod for pod in self.pods.objects.values() if lives(pod) and waits(pod))
        return dict(Counter(pod["metadata"]["labels"][LABEL_JOB_NAME] for pod in pods))

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        status = self.jobs.objects[self.keys[name]].get("status") or {}
        found = next((c for c in status.get("conditions") or () if c["type"] == kind), None)
        return (found["status"], found["reason"], found["message"]) if found else ("", "", "")

    async def until_holding(self, seconds: float = 300.0, **wanted: int) -> None:
        await self._until(lambda: None if self.holding() == wanted else f"{self.holding()}, not {wanted}", seconds)

    async def until_trains(self, name: str, pipelines: str = "", seconds: float = 300.0) -> None:
        def problem() -> str | None:
            found = self.condition(name, "Running")
            return None if found[0] == "True" and found[2].startswith(pipelines) else f"{name}: {found}"

        await self._until(problem, seconds)

    async def complete(self, *names: str, seconds: float = 3000.0) -> None:
        """Wait until the jobs complete, and check that they have the weights of undisturbed jobs."""
        for name in names:
            await self._until(partial(self._unfinished, name), seconds)
            digests = self.crews[name].oracle.digests
            if add_digests(self.jobs.objects[self.keys[name]]["status"]["digests"]) != add_digests(digests):
                raise Failure(f"{name} ended with other weights")

    def _unfinished(self, name: str) -> str | None:
        return None if self.condition(name, "Complete")[0] == "True" else f"{name}: {self.condition(name, 'Running')}"

    async def _run(self) -> None:
        self.loop.set_exception_handler(self._raised)
        assert self.queue is not None
        self.start_operator()
        admitting, judging = asyncio.create_task(self.queue.run()), asyncio.create_task(self._judging())
        try:
            await self.course()
        finally:
            for task in (admitting, judging):
                task.cancel()
            await asyncio.gather(admitting, judging, return_exceptions=True)
            await self.stop_operator()

    async def _judging(self) -> None:
        assert self.queue is not None
        while True:
            await asyncio.sleep(0.5)
            self.queue.judge()

    async def course(self) -> None:
        """Run the disturbances and checks of one test; each test has a subclass with its own."""
        raise NotImplementedError

    async def restart(self, seconds: float = 3.0) -> None:
        await self.stop_operator()
        await asyncio.sleep(seconds)
        self.start_operator()

    def succeed(self) -> None:
        assert self.run().problem is None


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_shrinks_for_a_more_important_one_and_grows_again(seed: int, killed: bool) -> None:
    """The quota suffices for one and a half jobs. killed: the operator restarts while pods are preempted."""

    class Shrinking(Queued):
        async def course(self) -> None:
            self.make("first")
            await self.until_trains("first", "2 pipeline(s)")
            assert self.holding() == {"first": 4}
            self.make("second")
            if killed:
                await self._until(lambda: None if self.holding().get("second") else "it has nothing", 60.0)
                await self.restart()
            await self.until_holding(first=2, second=4)
            await self.until_trains("second", "2 pipeline(s)")
            await self.until_trains("first")  # one pipeline or two, which two workers train equally fast
            assert "2 worker(s) wait for quota" in self.condition("first", "WorkersReady")[2]
            assert self.waiting() == {"first": 2}
            await self.complete("second")
            await self.until_trains("first", "2 pipeline(s)")
            await self.complete("first")
            await self._until(lambda: "quota is held" if self.holding() else None, 60.0)

    whole = of_two_stages(seed + 10, steps=30, most=2, chooses=False)
    whole = replace(whole, arithmetic=replace(whole.arithmetic, pipelines=2, microbatches=4, groups=2))
    jobs = {"first": (of_two_stages(seed, steps=160, most=2), FIRST), "second": (whole, IMPORTANT)}
    Shrinking(jobs, 6).succeed()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_equal_jobs_whose_pods_are_admitted_in_turn_do_not_block_each_other(seed: int) -> None:
    """Kueue admits pods created in the same second in the order of their random UIDs. Here the first two that it
    admits belong to different jobs.
    """

    class Halves(Queued):
        async def course(self) -> None:
            self.manager.order = lambda pod: (
                int(pod["metadata"]["labels"][LABEL_WORKER_INDEX]),
                pod["metadata"]["uid"],
            )
            self.manager.stopped = True  # or the first job's pods may be admitted before the other one has any
            self.make("one", "other")
            both = {"one": 2, "other": 2}
            await self._until(lambda: None if self.waiting() == both else f"{self.waiting()}, not {both}", 60.0)
            self.manager.stopped = False
            await self.until_holding(one=1, other=1)
            await self.complete("one", "other")

    jobs = {name: (of_two_stages(seed + i, steps=30), {"name": "queue"}) for i, name in enumerate(("one", "other"))}
    Halves(jobs, 2).succeed()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_loses_all_its_workers_goes_on_from_a_checkpoint_when_it_has_quota_again(seed: int) -> None:
    """The operator restarts between the loss of all workers and the new quota."""

    class All(Queued):
        async def course(self) -> None:
            assert self.queue is not None
            self.make("one")
            await self.until_trains("one", "1 pipeline(s)")
            await asyncio.sleep(15.0)
            name = self.queue.compete(2)
            await self.until_holding()
            await asyncio.sleep(60.0)
            await self.restart()
            await asyncio.sleep(60.0)
            self.queue.withdraw(name)
            await self.complete("one")

    All({"one": (of_two_stages(seed, steps=40), {"name": "queue"})}, 2).succeed()
