"""The coordinator's invariants after any losses, notices, late workers and broken channels (Hypothesis)."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelClosed, WorkerJoined
from bamboo_core.coordinator.events import (
    Outcome,
    PreemptionNotice,
)
from replica_kit import copies
from slow_world import Slowed

actions = st.lists(
    st.tuples(st.sampled_from(["lose", "notice", "deliver", "settle", "cut", "away"]), st.integers(0, 20)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 3), actions)
@example(1, 1, True, 0, [("settle", 0)] * 5)  # layers and a step are measured in the same event
def test_invariants_hold_whatever_happens(
    stages: int, pipelines: int, chosen: bool, standby: int, what: list[tuple[str, int]]
) -> None:
    """The invariants hold on a fixed grid, and on a grid whose number of pipelines follows the workers."""
    chooses = ("pipelines",) if chosen else ()
    world = Slowed(stages, pipelines, standby, chooses=chooses, schedule="1F1B")
    world.settle()
    for action, index in what:
        if world.finish:
            break
        names = sorted(world.state.workers)
        worker = names[index % len(names)] if names else None
        if action == "deliver" and world.pending:
            world.deliver()
        elif action == "settle":
            world.settle()
        elif worker and action == "lose":
            world.lose(worker)
        elif worker and action == "notice":
            world.tell(PreemptionNotice(worker, 1e9))
        elif action == "away":
            world.away += index % 4
        elif worker and action == "cut":
            world.tell(ChannelClosed(worker))
            world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1)))
    world.settle()
    if world.state.plan is not None:
        world.train(40 if chosen else 0)
        world.settle()
    if world.finish:
        assert world.finish.outcome is Outcome.UNRECOVERABLE
        return
    plan = world.state.plan
    if plan is None:
        assert len(world.state.workers) < stages * pipelines
        return
    workers = sum(map(world.state.stays, world.state.workers))
    for worker in world.state.noticed:
        if workers:
            assert not plan.owned_by(worker), "a leaving worker still owns a cell, at rest"
    assert len(plan.layouts) == 1
    assert len(plan.pipelines) == plan.target.pipelines
    wanted = min(pipelines, workers // stages) if chosen else pipelines
    if wanted:
        assert len(plan.pipelines) == wanted, "not resized at rest"
    if wanted and workers >= stages * wanted:
        assert all(len(plan.owned_by(w)) <= 1 for w in world.state.workers), "not healed, although workers were there"
    if stages > 1 and workers > 1:
        for cell in plan.cells():
            assert copies(plan, world.state.plans.synced, cell) > 0, f"{cell} is unprotected at rest"
