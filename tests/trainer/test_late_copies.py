"""Copies that are made while the next step is run."""

import pytest

from bamboo_trainer.checkpoint.layer_file import encode
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.stage.state import late_copies
from split_state_kit import SPLITS, files_of, task_of
from stage_kit import CONFIG, begin, microbatch, one_step


@pytest.mark.parametrize("optimizer", ["AdamW", "plain SGD", "dampening", "numbers in groups"])
def test_copies_that_are_made_while_the_next_step_is_run_are_of_the_state_before(monkeypatch, optimizer):
    monkeypatch.setattr(late_copies, "PIECE_BYTES", 8)
    stage = build_stage(task_of(optimizer), 0, SPLITS[0], CONFIG)
    one_step([stage], 0)
    files = files_of([stage])
    late, works = stage.values.late_copies(range(7)), [begin(stage, 0, 1, 2)]
    pieces = 0
    while not late.done:
        if pieces < 3:
            microbatch([stage], works, 1, pieces)
        late.copy_piece()
        pieces += 1
    assert pieces > 10
    one_step([stage], 1)
    assert {layer: b"".join(encode(state)) for layer, state in late.layers.items()} == files
