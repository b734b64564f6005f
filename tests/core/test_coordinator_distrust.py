"""Distrust of workers: the coordinator refuses unsound and old plans, and bounds the length of workers' texts."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import AddWorkers, RemoveWorker, Send
from bamboo_core.planning.plan import Plan
from world import World, back, restarted


def hello(worker: str, plan: Plan | None) -> WorkerJoined:
    return WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=plan))


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("ragged", lambda plan: {"pipelines": (plan.pipelines[0][:1], *plan.pipelines[1:])}),
        ("without layouts", lambda plan: {"layouts": ()}),
        ("without pipelines", lambda plan: {"pipelines": ()}),
        ("owned by a stranger", lambda plan: {"workers": plan.workers[1:]}),
        ("of another model", lambda plan: {"stages": ((0, 4), (4, 10_001))}),
        ("of another job", lambda plan: {"stages": ((0, 2), (2, 5), (5, 8))}),
        ("of other microbatches", lambda plan: {"layouts": (replaced(plan.target, split=((0, 1), (2, 3))),)}),
        ("of no time", lambda plan: {"epoch": 0}),
        ("of all times", lambda plan: {"epoch": 10**18}),
    ],
)
def test_a_plan_that_can_be_none_of_the_jobs_is_refused_and_the_others_go_on(
    what: str, changes: Callable[[Plan], dict[str, Any]]
) -> None:
    world = World(2, 2, 0)
    plan = restarted(world)
    broken = replaced(plan, **changes(plan))
    state, commands = coordinator.step(world.state, hello("w1", broken), world.now)
    refused = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, protocol.Refused)]
    assert [r.reason for r in refused] == ["PlanUnsound"]
    assert RemoveWorker("w1") in commands
    assert (state.plan, state.workers, state.membership.requested) == (None, {}, world.state.membership.requested - 1)
    assert "w1" in state.membership.gone
    world.tell(hello("w1", broken))
    for worker in sorted(plan.worker_ids() - {"w1"}):
        back(world, worker, plan)
    assert world.state.phase == "Running"
    world.settle()
    assert world.finish is None


def test_who_comes_back_after_another_has_its_place_is_sent_away_and_not_waited_for() -> None:
    """The coordinator removes a returning worker that a newer plan has left out, although its pod still lives."""
    world = World(3, 1, 1)
    plan = restarted(world)
    rows = tuple(
        tuple(replaced(a, replicas=tuple(r for r in a.replicas if r != "w3")) for a in row) for row in plan.pipelines
    )
    newer = replaced(
        plan, epoch=plan.epoch + 1, workers=tuple(p for p in plan.workers if p.worker != "w3"), pipelines=rows
    )
    for worker in sorted(newer.worker_ids()):
        back(world, worker, newer)
    assert (world.state.phase, world.state.membership.requested) == ("Running", 1)
    state, commands = coordinator.step(world.state, hello("w3", plan), world.now)
    assert RemoveWorker("w3") in commands
    assert "w3" in state.membership.gone
    assert AddWorkers(1) in commands, "the job wants another one"


def test_what_a_worker_says_in_words_is_bounded() -> None:
    world = World(2, 1, 0)
    world.settle()
    world.tell(Received("w0", protocol.Heartbeat(step=1, doing="x" * 10**6)))
    assert len(world.state.workers["w0"].doing) < 10**4
    world.tell(Received("w0", protocol.WorkerFailed(reason="no reason\n", message="x" * 10**6)))
    assert world.end.reason == "WorkerError"
    assert len(world.end.message) < 10**4
