"""Jobs of several tenants on few nodes, in virtual time: the operator decides who gets which, and all end right."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bamboo_core.control.digests import add_digests
from bamboo_core.names import LABEL_JOB_NAME
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.signals.signals import lives
from bamboo_operator.tenants.tenant_list import TenantList
from opsim_nodes import Process
from opsim_scenario import ClusterScenario, scenario
from opsim_server import Object
from opsim_simulation import Failure, OperatorSimulation
from opsim_workers import Workers
from sim_arithmetic import Oracle
from tenant_kit import tenants

QUICK = {"afterSeconds": 5, "turnSeconds": 60}


def of_two_stages(seed: int, *, steps: int = 60, stages: int = 2, **changes: Any) -> ClusterScenario:
    """A job of one to `most` pipelines of two stages, or so many; a step takes about a second."""
    made, most = scenario(seed), changes.get("most", 1)
    sizes = {"stages": stages, "pipelines": 1, "microbatches": 4, "steps": steps, "sizes": (1,) * 6, "groups": 2}
    arithmetic = replace(made.arithmetic, **sizes)
    still = {"pools": (), "most": 1, "standby": 0, "policy": "Running", "disturbances": (), "slowdown": 60.0}
    return replace(made, arithmetic=arithmetic, mode="EagerForward", **{**still, **changes, "most": most})


class Fleet(OperatorSimulation):
    """The jobs of these names, in the order in which they are made; nodes: how many there are."""

    def __init__(self, jobs: dict[str, ClusterScenario], nodes: int, listed: TenantList) -> None:
        self.keys = {name: (f"team-{name}", name) for name in jobs}
        super().__init__(next(iter(jobs.values())), tenants=listed)
        self.scenarios, self.kubelets.room = jobs, nodes
        self.crews = {name: self._crew(self.keys[name], one) for name, one in jobs.items()}
        self.placed: list[str] = []  # jobs whose pods got a node, one after the other
        self.most: Counter[str] = Counter()  # workers with a node, at a time
        self.events: list[tuple[str, str, str]] = []

    def _crew(self, key: JobKey, of: ClusterScenario) -> Workers:
        return Workers(self.loop, self.rng, Oracle(of.arithmetic), key, of.slowdown, of.work, self.fail)

    def _start(self, pod: Object) -> Process:
        return self.crews[pod["metadata"]["labels"][LABEL_JOB_NAME]].start(pod, partial(self._ended, pod))

    def start_operator(self) -> None:
        super().start_operator()
        for crew in self.crews.values():
            crew.gateway = self.workers.gateway

    def make(self, name: str) -> None:
        manifest = self.scenarios[name].manifest()
        namespace, job = self.keys[name]
        self.server.create("bamboojobs", {**manifest, "metadata": {"name": job, "namespace": namespace}})

    def _changed(self, what: str, thing: Object) -> None:
        before = self.on_nodes()
        super()._changed(what, thing)
        if what == "pods MODIFIED" and "nodeName" in thing["spec"]:
            self.most |= before
            if (thing["status"].get("phase") or "Pending") == "Pending":
                self.placed.append(thing["metadata"]["labels"][LABEL_JOB_NAME])

    def on_nodes(self) -> Counter[str]:
        """Workers with a node, by job."""
        pods = (pod for pod in self.pods.objects.values() if lives(pod) and "nodeName" in pod["spec"])
        return Counter(pod["metadata"]["labels"][LABEL_JOB_NAME] for pod in pods)

    def status(self, name: str) -> Object:
        found: Object = self.jobs.objects[self.keys[name]].get("status") or {}
        return found

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        found = next((c for c in self.status(name).get("conditions") or () if c["type"] == kind), None)
        return (found["status"], found["reason"], found["message"]) if found else ("", "", "")

    def is_over(self, name: str) -> str | None:
        return None if self.condition(name, "Complete")[0] == "True" else f"{name}: {self.status(name)}"

    async def until(self, name: str, kind: str, reason: str, seconds: float = 300.0) -> str:
        """The message of that condition of a job, once it has that reason."""

        def problem() -> str | None:
            found = self.condition(name, kind)
            return None if found[1] == reason else f"{name}: {kind} {found}"

        await self._until(problem, seconds)
        return self.condition(name, kind)[2]

    async def complete(self, *names: str, seconds: float = 2000.0) -> None:
        """All end, with the weights of undisturbed jobs."""
        for name in names:
            await self._until(partial(self.is_over, name), seconds)
            digests = self.crews[name].oracle.digests
            if add_digests(self.status(name)["digests"]) != add_digests(digests):
                raise Failure(f"{name} ended with {self.status(name)['digests']}, and should have with {digests}")

    async def _run(self) -> None:
        self.loop.set_exception_handler(self._raised)
        self.start_operator()
        try:
            await self.course()
        finally:
            await self.stop_operator()

    async def course(self) -> None:
        """What the test is about."""
        raise NotImplementedError

    def lose_a_node(self, name: str) -> None:
        """One that a worker of that job runs on; another one comes for it."""
        pods = [
            pod
            for pod in self.pods.objects.values()
            if pod["metadata"]["labels"][LABEL_JOB_NAME] == name and lives(pod)
        ]
        self.kubelets.vanish(pods[0])

    def succeed(self) -> None:
        assert self.run().problem is None


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_broken_gets_the_next_node_and_who_waits_begins_whole(seed: int) -> None:
    class Broken(Fleet):
        async def course(self) -> None:
            self.make("a")
            self.make("b")
            await self.until("a", "Running", "Training")
            await self.until("b", "Running", "Training")
            self.make("c")
            await asyncio.sleep(20.0)
            assert self.on_nodes() == {"a": 2, "b": 2}
            self.lose_a_node("b")
            message = await self.until("c", "HeldBack", "WaitsInLine")
            assert message.startswith("waits for nodes behind team-b/b: it has lost 1 worker"), message
            await self._until(lambda: None if self.on_nodes()["b"] == 2 else "b lacks a node", 200.0)
            assert self.placed.count("c") == 0, self.placed
            await self.complete("a", "b", "c")

    long, short = partial(of_two_stages, steps=120), partial(of_two_stages, steps=30)
    Broken({"a": long(seed), "b": long(seed + 10), "c": short(seed + 20)}, 4, tenants(order=QUICK)).succeed()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_jobs_that_would_each_hold_half_of_what_they_need_begin_one_after_the_other(seed: int) -> None:
    class Halves(Fleet):
        async def course(self) -> None:
            for name in self.scenarios:
                self.make(name)
            await self.complete(*self.scenarios)

    jobs = {name: of_two_stages(seed + i, steps=30, stages=3) for i, name in enumerate("abc")}
    Halves(jobs, 4, tenants(order=QUICK)).succeed()


@pytest.mark.parametrize(("chooses", "left"), [(False, 2), pytest.param(True, 3, marks=pytest.mark.slow)])
def test_a_job_shrinks_for_another_of_its_tenant_and_grows_again(chooses: bool, left: int) -> None:
    """By a pipeline; by a worker where the coordinator chooses the grid."""

    class Shrinking(Fleet):
        async def course(self) -> None:
            self.make("a")
            await self._until(lambda: None if self.on_nodes()["a"] == 4 else "a has not grown", 300.0)
            self.make("b")
            message = await self.until("a", "HeldBack", "TenantBound")
            assert message == f"it may have {left} of 4 workers: tenant both may have 5 workers"
            await self.until("b", "Running", "Training")
            shrunk = {"a": left, "b": 2}  # who leaves with a notice does not count, and may still be there
            await self._until(lambda: None if self.on_nodes() == shrunk else f"{self.on_nodes()}", 60.0)
            await self.complete("b")
            await self._until(lambda: None if self.on_nodes()["a"] == 4 else "a has not grown again", 300.0)
            await self.complete("a")
            assert self.most["a"] <= 4

    listed = tenants({"name": "both", "namespaces": ["team-a", "team-b"], "most": {"workers": 5}}, order=QUICK)
    jobs = {"a": of_two_stages(4, steps=200, most=2, chooses=chooses), "b": of_two_stages(5, steps=20)}
    Shrinking(jobs, 100, listed).succeed()


def test_an_operator_that_comes_later_decides_as_the_one_before() -> None:
    class Restarted(Fleet):
        async def course(self) -> None:
            self.make("a")
            self.make("b")
            await self.until("b", "HeldBack", "TenantBound")
            await self.until("a", "Running", "Training")
            await self.stop_operator()
            await asyncio.sleep(5.0)
            self.start_operator()
            await asyncio.sleep(30.0)
            assert self.on_nodes() == {"a": 2}
            await self.complete("a", "b")

    listed = tenants({"name": "both", "namespaces": ["*"], "most": {"workers": 3}}, order=QUICK)
    Restarted({"a": of_two_stages(6, steps=80), "b": of_two_stages(7, steps=20)}, 100, listed).succeed()


def test_a_tenants_money_of_a_day_suspends_its_jobs_over_operators_and_deletions() -> None:
    """A worker costs one a second: the first job, which is deleted, has spent some of what the second one may."""

    class Broke(Fleet):
        async def course(self) -> None:
            self.make("a")
            await self.until("a", "Running", "Training")
            await asyncio.sleep(20.0)
            self.server.delete("bamboojobs", self.jobs.objects[self.keys["a"]])
            await asyncio.sleep(70.0)
            self.make("b")
            await self.until("b", "Running", "Training")
            await self.stop_operator()
            await asyncio.sleep(2.0)
            self.start_operator()
            message = await self.until("b", "Suspended", "TenantBudgetSpent")
            assert message.startswith("tenant both has spent its 150 of this day; its jobs go on"), message
            await self._until(lambda: "pods are left" if self.on_nodes() else None, 100.0)
            assert float(self.status("b")["cost"]["total"]) < 130, "the deleted job's cost counts"
            await self.stop_operator()
            self.start_operator()
            seen = [self.condition("b", "Suspended")[1] for _ in range(20) if not await asyncio.sleep(1.0)]
            assert set(seen) == {"TenantBudgetSpent"}, seen
            self.tenants.current = listed("1000")
            await self.complete("b")
            assert "tenant both has spent" not in self.status("b")["cost"].get("budget", "")

    def listed(money: str) -> TenantList:
        return tenants({"name": "both", "namespaces": ["*"], "most": {"moneyPerDay": money}}, order=QUICK)

    kept = {"storage": {"uri": "s3://bucket/x"}, "everySteps": 10}
    priced = partial(of_two_stages, pools=({"name": "spot", "pricePerHour": "3600"},), steps=100)
    Broke({"a": priced(8), "b": priced(9, checkpoint=kept)}, 100, listed("150")).succeed()
