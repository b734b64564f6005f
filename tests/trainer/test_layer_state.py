"""A stage's state by layer: bit-exact restores on any split, and copies that are made while the next step runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bamboo_core.control.digests import add_digests
from bamboo_trainer.checkpoint.layer_file import decode, encode
from bamboo_trainer.stage import layer_state
from bamboo_trainer.stage.stage import build_stage
from split_state_kit import OPTIMIZERS, SPLITS, files_of, task_of
from stage_kit import CONFIG, begin, chain, microbatch, one_step, small_task, whole_state


def restored(task, split, files):
    """Return stages that have restored only the layers they need, as workers do."""
    stages = chain(task, split)
    for stage, (first, end) in zip(stages, split, strict=True):
        wanted = stage.values.layers_needed()
        assert {*range(first, end)} <= {*wanted}
        stage.values.restore({layer: decode(files[layer]) for layer in wanted})
    return stages


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_training_goes_on_at_another_split_as_if_it_had_never_stopped(optimizer, steps):
    task = task_of(optimizer)
    undisturbed = chain(task, SPLITS[1])
    for k in range(steps):
        one_step(undisturbed, k)
    files = files_of(undisturbed)
    others = [restored(task, split, files) for split in SPLITS]
    for stages in others:
        assert files_of(stages) == files
        assert {stage.values.version for stage in stages} == {steps}
    for k in range(steps, steps + 2):
        losses = {one_step(stages, k) for stages in (undisturbed, *others)}
        assert len(losses) == 1
    later = files_of(undisturbed)
    assert later != files
    for stages in others:
        assert files_of(stages) == later


@pytest.mark.parametrize("optimizer", ["AdamW", "dampening"])
def test_tied_parameters_are_restored_on_every_stage_that_has_them(optimizer):
    task = task_of(optimizer, tied=True)
    for split in SPLITS:
        undisturbed = chain(task, split)
        for k in range(2):
            one_step(undisturbed, k)
        files = files_of(undisturbed)
        assert "parameter:2.weight" in decode(files[2]).tensors
        last = decode(files[5])
        assert last.tensors.keys() == set()
        assert last.names == {"weight": "parameter:2.weight", "again": "parameter:2.weight"}
        for other in SPLITS:
            assert files_of(restored(task, other, files)) == files
        again = restored(task, split, files)
        replicas = chain(task, split)
        for replica, one in zip(replicas, undisturbed, strict=True):
            replica.values.restore(whole_state(one))
        for stages in (again, replicas):
            assert [one.values.digest() for one in stages] == [one.values.digest() for one in undisturbed]
        assert one_step(again, 2) == one_step(undisturbed, 2)
        assert files_of(again) == files_of(undisturbed) != files


def test_what_is_frozen_and_shared_is_a_part_of_each_layer_that_has_it():
    """A frozen parameter and a buffer that two layers share are in both layers' states, whatever the split."""
    base, table = nn.Parameter(torch.full((3,), 2.0), requires_grad=False), torch.linspace(0, 1, 3)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.weight = base, nn.Parameter(torch.ones(3))
            self.register_buffer("table", table)

        def forward(self, given):
            return given * self.base * self.weight + self.table

    task = small_task(layers=(lambda: nn.Linear(2, 3), Adapted, Adapted, lambda: nn.Linear(3, 2)))
    splits = [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 3), (3, 4)]]
    for split in splits:
        files = files_of(chain(task, split))
        assert decode(files[2]).names == {
            "base": "constant:2.base",
            "weight": "parameter:2.weight",
            "table": "constant:2.table",
        }
        others = [restored(task, other, files) for other in splits]
        assert all(files_of(stages) == files for stages in others)
        assert len({add_digests(stage.values.digest() for stage in stages) for stages in others}) == 1


def test_only_the_layers_that_a_worker_writes_are_copied():
    stage = build_stage(task_of(), 0, SPLITS[0], CONFIG)
    assert stage.values.layer_states(only=[4, 1]).keys() == {1, 4}
    state = stage.values.layer_states(only=[1])[1]
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    one_step([stage], 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors.items())
    assert set(state.names) == {"inner.weight", "inner.bias", "shift", "nothing", "temperature"}
    assert state.names["inner.bias"] == "constant:1.inner.bias"
    assert "constant:1.hidden" in state.tensors


class Renamed(nn.Linear):
    """A layer whose state_dict has a value that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__(2, 2)
        self._register_state_dict_hook(self._more)

    @staticmethod
    def _more(module, state, prefix, _):
        state[f"{prefix}doubled"] = 2 * module.weight.detach()


def test_what_only_the_state_dict_has_is_kept_for_its_readers():
    task = small_task(layers=(Renamed,))
    stage = build_stage(task, 0, [(0, 1)], CONFIG)
    one_step([stage], 0)
    files = files_of([stage])
    state = decode(files[0])
    assert state.names["doubled"] == "value:0.doubled"
    assert torch.equal(state.tensors["value:0.doubled"], 2 * state.tensors["parameter:0.weight"])
    assert files_of(restored(task, [(0, 1)], files)) == files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states.pop(4), "the state of layer 4 is missing"),
        (lambda states: states.update({1: replace(states[1], version=7)}), "of steps 2 and 7, expected the same step"),
        (lambda states: states[6].tensors.pop("parameter:6.bias"), "lacks parameter:6.bias"),
        (lambda states: states[6].tensors.update({"parameter:6.x": torch.ones(2)}), "holds parameter:6.x, which"),
        (lambda states: states[6].tensors.update({"parameter:6.bias": torch.ones(3)}), "6.bias is .* expected"),
        (lambda states: states.update({0: states[6]}), "lacks parameter:0"),
        (lambda states: states[6].scalars.update({"parameter:6.bias": 1}), "holds parameter:6.bias twice"),
    ],
)
def test_states_that_do_not_fit_are_refused_whole(change, message):
    stage = build_stage(task_of(), 0, SPLITS[0], CONFIG)
    for k in range(2):
        one_step([stage], k)
    states = {layer: decode(data) for layer, data in files_of([stage]).items()}
    change(states)
    other = build_stage(task_of(), 0, SPLITS[0], CONFIG)
    digest = other.values.digest()
    with pytest.raises(ValueError, match=message):
        other.values.restore(states)
    assert (other.values.digest(), other.values.version) == (digest, 0)


@pytest.mark.parametrize("optimizer", ["AdamW", "plain SGD", "dampening", "numbers in groups"])
def test_copies_that_are_made_while_the_next_step_is_run_are_of_the_state_before(monkeypatch, optimizer):
    monkeypatch.setattr(layer_state, "PIECE_BYTES", 8)
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
