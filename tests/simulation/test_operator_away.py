"""Edits of a job whose operator is killed shortly before or after the edit, and losses of workers without an operator.

The real operator runs in virtual time; another one starts a few seconds after the kill.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.job.api_object import written
from bamboo_operator.status.document import job_status
from opsim_scenario import JOB, ClusterScenario, scenario
from opsim_server import Object
from opsim_simulation import Failure, OperatorSimulation
from opsim_user import User
from sim_worker import Node

AWAY_SECONDS = 5.0
FOUND_SECONDS = 4.0  # from an operator's start: by then all workers have tried to connect to it
TRAINED_STEPS = 10  # before anything is asked
MONEY = 120  # more than a job has cost when the next operator begins
POINTS = (-3.0, -0.05, 0.05, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 4.0, 8.0)  # when the operator is killed, from the edit on


def some(points: Sequence[float]) -> list[Any]:
    """Return all of POINTS as parameters, marked as slow unless they are in `points`."""
    return [point if point in points else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]


SOON = some([0.05])  # not slow: before the operator has done anything about the edit


def job_of(seed: int, *, steps: int = 40, **changes: Any) -> ClusterScenario:
    """Return a scenario with two stages, steps of a few seconds and no periodic checkpoints. changes: to its fields."""
    made = scenario(seed)
    arithmetic = replace(made.arithmetic, stages=2, pipelines=1, steps=steps, sizes=(1,) * 6, groups=2)
    still = {"pools": (), "most": 1, "standby": 0, "disturbances": (), "slowdown": 60.0}
    stored = {"everySteps": 1000, "storage": "memory://x"}
    return replace(made, arithmetic=arithmetic, checkpoint=stored, **{**still, **changes})


class Away(OperatorSimulation):
    """A run whose operator is killed near an edit. kill_at: seconds after the edit; negative: before it."""

    def __init__(self, of: ClusterScenario, edit: Callable[[Object], None], kill_at: float, **others: Any) -> None:
        super().__init__(of, **others)
        self.edit, self.kill_at = edit, kill_at
        self.trained = -1  # the newest step that any worker knows to be committed
        self.begun_at: list[int] = []  # the first steps of trainings
        self.made: list[str] = []  # pods, since the edit
        self.edited = False
        self.user = User(self)
        self.workers.turned = self._look  # type: ignore[method-assign]

    async def _run(self) -> None:
        self.loop.set_exception_handler(self._raised)
        self.user.create()
        self.start_operator()
        try:
            await self._until(lambda: None if self.trained >= TRAINED_STEPS else "it does not train", 200.0)
            await self.course()
        finally:
            await self.stop_operator()

    async def course(self) -> None:
        """Run the rest of the scenario, once the job trains."""
        raise NotImplementedError

    async def edit_and_kill(self) -> None:
        """Edit the job and kill the operator, in the order that kill_at gives, and then start another operator."""
        if self.kill_at < 0:
            await self.stop_operator()
            await asyncio.sleep(-self.kill_at)
            self.ask()
        else:
            self.ask()
            await asyncio.sleep(self.kill_at)
            await self.stop_operator()
        await asyncio.sleep(AWAY_SECONDS)
        self.start_operator()

    def ask(self) -> None:
        self.edited = True
        self.user.edit(self.edit)

    def _changed(self, what: str, thing: Object) -> None:
        super()._changed(what, thing)
        if what == "pods ADDED" and self.edited:
            self.made.append(thing["metadata"]["name"])

    def _look(self, node: Node) -> None:
        """Record, after a worker's turn, the first step of its plan, if that is new, and its newest committed step."""
        parts = node.engine.components if node.engine else None
        if parts is None or not node.alive:
            return
        first = parts.plan.current.first_step
        if not self.begun_at or self.begun_at[-1] != first:
            self.begun_at.append(first)
        self.trained = max(self.trained, parts.committer.log.newest)


class Suspended(Away):
    """A scenario in which a suspended job keeps its state, and goes on from it when it is resumed."""

    async def course(self) -> None:
        await self.edit_and_kill()
        await self.resume()

    async def resume(self) -> None:
        await self._until(lambda: self._left("pods", "processes"), 200.0)
        kept = max((one.step for one in self.workers.store.committed), default=0)
        if kept != self.trained + 1:
            raise Failure(f"step {self.trained} was committed, and the state of step {kept} is kept")
        await asyncio.sleep(5.0)
        if self.job["status"]["state"] != "Suspended" or self.job["status"].get("plan"):
            raise Failure(f"it is not suspended: {self.job['status']}")
        if self.made:
            raise Failure(f"pods were made for a job that is to be suspended: {self.made}")
        self.user.edit(self.again)
        await self._until(self._over, 1000.0)
        self._judge(self.user)
        if self.begun_at != [0, kept]:
            raise Failure(f"trainings began at {self.begun_at}, and {kept} was kept")

    @staticmethod
    def again(spec: Object) -> None:
        spec["suspend"] = False


class OutOfMoney(Suspended):
    """A scenario in which a spent budget suspends the job, without an edit of `suspend`."""

    async def resume(self) -> None:
        await self._until(lambda: self._left("pods", "processes"), 200.0)
        await asyncio.sleep(5.0)
        found = next(c for c in job_conditions(self) if c["type"] == "Suspended")
        if found["reason"] != "BudgetSpent" or f"the budget of {MONEY} is spent" not in found["message"]:
            raise Failure(f"it does not say why it is suspended: {found}")
        if not MONEY <= float(self.job["status"]["cost"]["total"]) < MONEY + 30:
            raise Failure(f"it has cost {self.job['status']['cost']} of {MONEY}")
        await super().resume()

    @staticmethod
    def again(spec: Object) -> None:
        spec["budget"] = {"money": "1000000"}


class SuspendedWhileTakenOver(Suspended):
    """A scenario in which a job is suspended `kill_at` s after a new operator starts, maybe before workers join."""

    async def course(self) -> None:
        await self.stop_operator()
        await asyncio.sleep(AWAY_SECONDS)
        self.start_operator()
        await asyncio.sleep(self.kill_at)
        self.ask()
        await self.resume()


class TrainsOn(Away):
    """A scenario in which a job follows an edit and does not begin anew. followed: returns what is missing, or None."""

    def __init__(self, *given: Any, followed: Callable[["TrainsOn"], str | None]) -> None:
        super().__init__(*given)
        self.followed = followed

    async def course(self) -> None:
        await self.edit_and_kill()
        await self._until(lambda: self._at_rest() or self.followed(self), 90.0)
        if self._ends():
            raise Failure("it was over before the edit was followed")
        await self._until(self._over, 1000.0)
        self._judge(self.user)
        if self.begun_at != [0]:
            raise Failure(f"trainings began at {self.begun_at}")


class Deleted(Away):
    """A scenario of a deleted job: its workers end with their pods, and no checkpoint is written."""

    async def course(self) -> None:
        self.loop.call_later(max(0.0, -self.kill_at), self.user.delete)
        await self.edit_and_kill()
        await self._until(lambda: self._left("pods", "processes", "reconcilers", "gateway", "listeners"), 60.0)
        if self.workers.store.committed:
            raise Failure(f"{self.workers.store.committed} were written")


class Lost(Away):
    """A scenario in which a job loses a worker while there is no operator. way: how the worker is lost."""

    def __init__(self, of: ClusterScenario, way: str) -> None:
        super().__init__(of, nothing, 0.0)
        self.way = way
        self.gone = ""  # the worker

    async def course(self) -> None:
        await self._until(self._at_rest, 60.0)
        await self.stop_operator()
        await asyncio.sleep(1.0)
        pod = self.living_pods()[0]
        self.gone = pod["metadata"]["name"]
        self.lose(pod)
        await asyncio.sleep(AWAY_SECONDS)
        self.start_operator()
        began = self.loop.time()
        while self.runner is None or (plan := self.runner.state.plan) is None or self.gone in plan.worker_ids():
            self.look_at_status()
            if self.loop.time() - began > FOUND_SECONDS:
                raise Failure(f"{self.gone} is waited for")
            await asyncio.sleep(0.02)
        await self._until(self._over, 1000.0)
        self._judge(self.user)

    def lose(self, pod: Object) -> None:
        process = self.kubelets.processes[pod["metadata"]["uid"]]
        match self.way:
            case "the pod is removed":
                process.end(-9)
                self.server.remove("pods", pod)
            case "the pod has ended":
                process.end(-9)
            case "the node is removed":
                node = self.nodes.objects["", pod["spec"]["nodeName"]]
                process.end(None)
                self.server.remove("nodes", node)

    def look_at_status(self) -> None:
        """Fail if the status says Protected before all workers of the plan have reported to the coordinator."""
        if self.runner is None or self.runner.state.phase != "Recovering" or self.runner.state.plan is None:
            return
        found = {c["type"]: c["status"] for c in job_conditions(self)}
        if found["Protected"] == "True":
            raise Failure("it says that it is protected")


def job_conditions(simulation: OperatorSimulation) -> list[Object]:
    """Return the conditions that the operator would write now."""
    assert simulation.controller is not None
    known = simulation.controller.known(JOB)
    assert known is not None
    found: list[Object] = written(job_status(known.view.live, known.view.status, known.facts))["conditions"]
    return found


def suspend(spec: Object) -> None:
    spec["suspend"] = True


def small_budget(spec: Object) -> None:
    """Set a budget that is soon spent, since two workers cost 2 per second."""
    spec["budget"] = {"money": str(MONEY)}


def new_image(spec: Object) -> None:
    spec["worker"] = {"image": "good:1"}


def other_schedule(spec: Object) -> None:
    spec["topology"]["schedule"] = "ZBH1"


def nothing(_: Object) -> None:
    """Leave the spec alone, in scenarios without an edit."""


def schedule_is_not_the_new_one(simulation: TrainsOn) -> str | None:
    plan = simulation.runner and simulation.runner.state.plan
    return None if plan and plan.target.schedule == "ZBH1" else "the schedule is not ZBH1"


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kill_at", some([0.4]))
def test_a_suspended_job_keeps_its_state_whenever_its_operator_ends(kill_at: float, seed: int) -> None:
    assert Suspended(job_of(seed), suspend, kill_at).run().problem is None


@pytest.mark.parametrize("kill_at", some([1.0]))
def test_a_job_whose_budget_is_spent_is_suspended_and_goes_on_with_a_larger_one(kill_at: float) -> None:
    priced = job_of(13, steps=60, pools=({"name": "spot", "pricePerHour": "3600"},))
    assert OutOfMoney(priced, small_budget, kill_at).run().problem is None


@pytest.mark.parametrize(
    "after", [0.6, *(pytest.param(more, marks=pytest.mark.slow) for more in (0.0, 0.02, 0.1, 2.0))]
)
def test_it_does_so_if_the_next_operator_has_not_heard_its_workers_yet(after: float) -> None:
    assert SuspendedWhileTakenOver(job_of(4), suspend, after).run().problem is None


@pytest.mark.parametrize("kill_at", SOON)
def test_an_edit_is_followed_whenever_the_operator_ends(kill_at: float) -> None:
    run = TrainsOn(job_of(6, steps=80), other_schedule, kill_at, followed=schedule_is_not_the_new_one).run()
    assert run.problem is None


@pytest.mark.parametrize("kill_at", SOON)
def test_workers_are_replaced_one_after_the_other_whenever_the_operator_ends(kill_at: float) -> None:
    """The run fails in `_at_rest` unless all workers get the new image."""
    assert TrainsOn(job_of(7, steps=80), new_image, kill_at, followed=lambda _: None).run().problem is None


@pytest.mark.parametrize("kill_at", SOON)
def test_a_deleted_jobs_workers_end_whenever_the_operator_ends(kill_at: float) -> None:
    assert Deleted(job_of(9), nothing, kill_at).run().problem is None


@pytest.mark.parametrize("seed", [10, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (11, 12))])
@pytest.mark.parametrize(
    "way",
    [
        "the node is removed",
        *(pytest.param(f"the pod {end}", marks=pytest.mark.slow) for end in ("is removed", "has ended")),
    ],
)
def test_a_worker_that_is_gone_when_the_operator_begins_is_not_waited_for(way: str, seed: int) -> None:
    made = job_of(seed)
    grown = replace(made, arithmetic=replace(made.arithmetic, stages=4, sizes=(1,) * 12), standby=1)
    assert Lost(grown, way).run().problem is None
