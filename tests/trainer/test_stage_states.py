"""The states of stages on a worker: which are kept, and which step may be applied to which."""

import msgspec
import pytest
import torch

from bamboo_core.planning.plan import Assignment, Cell
from bamboo_trainer.frames.payloads import Commit
from bamboo_trainer.stage.stage_states import StageStates
from bamboo_trainer.stage.state.values import StageValues
from replica_kit import planned
from stage_kit import states_of

PLAN = planned(3, 1, 1, "a")
OWNER = [PLAN.at(Cell(0, s)).owner for s in range(3)]
COMMIT = Commit(norm=1.0, loss=1.0, microbatches=3, generation=0, epoch=1)


def states(worker: str) -> StageStates:
    return states_of(worker, PLAN)


def gradient(values: StageValues) -> tuple[torch.Tensor]:
    return (torch.zeros(values.final.size),)


def test_a_worker_has_what_it_runs_and_what_it_keeps_for_others() -> None:
    here = states(OWNER[0])
    kept = {c.stage for c in PLAN.replicated_by(OWNER[0])}
    assert {s for s in range(3) if s in here} == {0} | kept
    assert here.by_stage[0].owned
    assert not any(here.by_stage[s].owned for s in kept)
    assert [s in states("a stranger") for s in range(3)] == [False] * 3


def test_a_part_that_comes_later_is_awaited_and_one_that_goes_is_dropped() -> None:
    here = states(OWNER[0])
    lacking = next(s for s in range(3) if s not in here)
    row = [msgspec.structs.replace(a, replicas=()) for a in PLAN.pipelines[0]]
    row[lacking] = Assignment(owner=row[lacking].owner, replicas=(OWNER[0],))
    after = msgspec.structs.replace(PLAN, epoch=2, pipelines=(tuple(row),))
    here.take_roles(after, OWNER[0])
    assert sorted(here) == sorted({0, lacking})
    assert (here.version(lacking), here.here(lacking), here.version(0)) == (-1, None, 0)


def test_nobody_can_be_made_the_owner_of_a_stage_without_its_state() -> None:
    here = states("w9")
    row = (Assignment(owner="w9"), *PLAN.pipelines[0][1:])
    with pytest.raises(AssertionError, match="w9 is to own stage 0"):
        here.take_roles(msgspec.structs.replace(PLAN, epoch=2, pipelines=(row,)), "w9")


def test_final_gradients_are_kept_once_and_not_of_steps_that_are_applied() -> None:
    here = states(OWNER[0])
    final = gradient(here[0])
    assert here.keep_final(0, 0, final)
    assert not here.keep_final(0, 0, final)
    assert (here.secured(0), here.final_steps(0), here.has_final(0, 0)) == (1, [0], True)
    here.apply(0, COMMIT)
    assert (here.version(0), here.final(0, 0)) == (1, None)
    assert not here.keep_final(0, 0, final)


def test_a_step_is_applied_if_it_is_committed_and_was_run_here_or_all_of_its_stages_can() -> None:
    here = states(OWNER[0])
    (kept,) = set(here) - {0}
    here.keep_final(0, 0, gradient(here[0]))
    assert here.applicable({0}, set(), owned=False) is None, "the replica's gradient is not here yet"
    assert here.applicable({0}, {0}, owned=False) == 0
    assert here.applicable(set(), {0}, owned=False) is None
    here.keep_final(kept, 0, gradient(here[kept]))
    assert here.applicable({0}, set(), owned=False) in (0, kept)
    assert here.applicable({0}, set(), owned=True) == 0


def test_a_skipped_step_moves_the_version_and_not_the_state() -> None:
    here = states(OWNER[0])
    before = here[0].state_tensors()
    here.keep_final(0, 0, (torch.ones(here[0].final.size),))
    here.apply(0, msgspec.structs.replace(COMMIT, skipped=True))
    assert here.version(0) == 1
    assert all(torch.equal(value, before[name]) for name, value in here[0].state_tensors().items())


def test_a_state_of_another_worker_is_taken_over_with_the_gradients_that_follow_it() -> None:
    owner, replica = states(OWNER[2]), states(OWNER[2])
    for step in range(2):
        owner.keep_final(2, step, gradient(owner[2]))
        owner.apply(2, COMMIT)
    for step in (0, 3):
        replica.keep_final(2, step, gradient(replica[2]))
    replica.restore(2, PLAN.stages, owner[2].layer_states(shown=False))
    assert (replica.version(2), replica.final_steps(2)) == (2, [3])
    assert replica[2].digest() == owner[2].digest()
    assert (replica.oldest(otherwise=9), states("a stranger").oldest(otherwise=9)) == (
        min(replica.version(s) for s in replica),
        9,
    )
