"""What a worker runs of the stages that it holds replicas of, while it has nothing else to do."""

import msgspec
import pytest

from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.engine.steps.rehearsals import PERIOD
from engine_kit import THREE, OneEngine

BEHIND = Cell(0, 1)  # w0 runs the first stage


def names(one: OneEngine) -> list[tuple[str, int]]:
    return [(name, m) for name, cell, m in one.did if cell == BEHIND]


@pytest.mark.parametrize(("mode", "expected"), [("None", []), ("Replicas", [("Rehearsal", 0)])])
def test_the_stage_behind_is_tried_once_if_it_is_held_here(mode: str, expected: list[object]) -> None:
    """What runs for the first time is slow, and must not be so in a takeover."""
    rows = tuple(msgspec.structs.replace(row, replicas=()) for row in THREE.pipelines[0])
    bare = msgspec.structs.replace(THREE, mode=RedundancyMode.NONE, pipelines=(rows,))
    one = OneEngine("w0", bare if mode == "None" else THREE)
    one.work()
    assert names(one) == expected


def test_nothing_is_tried_out_in_a_step_in_which_roles_have_changed() -> None:
    """Others may wait for what is repeated then. w2 holds the first stage, whose inputs are always there."""
    calm, changed = OneEngine("w2", THREE), OneEngine("w2", THREE)
    changed.engine.obey(msgspec.structs.replace(THREE, epoch=THREE.epoch + 1))
    assert calm.work() == [("Rehearsal", 0)]
    assert changed.work() == []


def test_now_and_then_a_forward_of_the_stage_behind_is_timed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a step, so that the workers of one pipeline can be compared. w2 holds the first stage."""
    one = OneEngine("w2", THREE)
    one.work()
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(StageTimer, "ran_layer", lambda _, stage, layer, seconds: told.append((stage, layer)))
    stage = one.inside.states.stage(0)
    assert stage is not None
    for step in range(1, PERIOD + 1):
        one.inside.committer.log.newest = step - 1
        stage.values.version = one.inside.executor.cells[Cell(0, 2)].step = step
        assert one.work() == ([("Rehearsal", 0)] if step == PERIOD else []), step
    assert told == [(0, layer) for layer in range(*THREE.stages[0])]
    assert one.work() == []
