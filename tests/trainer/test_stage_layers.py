"""A state that is kept layer by layer goes on in stages of any split, with the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bamboo_trainer.checkpoint.layer_file import decode, encode
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state import late_copies
from bamboo_trainer.tasks.task_errors import TaskError
from counting_optimizers import Averaging, Listing, OfWhole
from stage_kit import CONFIG, begin, chain, microbatch, one_step, small_gpt, small_task

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS = {
    "plain SGD": lambda named: SGD(named, lr=0.1),
    "momentum": lambda named: SGD(named, lr=0.1, momentum=0.9),
    "dampening": lambda named: SGD(named, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda named: ADAMW(named, amsgrad=True),
    "foreach": lambda named: ADAMW(named, foreach=True),
    "fused": lambda named: ADAMW(named, fused=True),
    "Adagrad": lambda named: torch.optim.Adagrad(named, initial_accumulator_value=0.5),
    "NAdam": lambda named: torch.optim.NAdam(named),
    "Rprop": lambda named: torch.optim.Rprop(named),
    "numbers in groups": lambda named: Averaging(p for _, p in named),
}


class Block(nn.Module):
    """Trained, frozen, and buffers: one that belongs to the state dict, one that does not, one of no elements."""

    def __init__(self, frozen=True):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.bias.requires_grad_(not frozen)
        self.register_buffer("shift", torch.linspace(0, 1, 3))
        self.register_buffer("hidden", torch.tensor(2), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 4))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.inner(x + self.shift) * self.temperature / self.hidden


class Tied(nn.Module):
    """Uses its weight under two names of its own, which another layer has too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) + 0.1)
        self.again = self.weight

    def forward(self, x):
        return x @ self.again.t() + x @ self.weight


LAYERS = (lambda: nn.Linear(2, 3), Block, Tied, nn.Tanh, Block, Tied, lambda: nn.Linear(3, 2))
SPLITS = (
    [(0, 7)],
    [(0, 3), (3, 7)],
    [(0, 1), (1, 5), (5, 7)],
    [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)],
)  # fmt: skip


def task_of(optimizer="AdamW", tied=False):
    names = (("2.weight", "5.again"),) if tied else ()
    return small_task(layers=LAYERS, optimizer=OPTIMIZERS[optimizer], tied=names)


def files_of(stages):
    """As workers write them: each stage its own layers."""
    return {
        layer: b"".join(encode(state)) for stage in stages for layer, state in stage.layer_states().items()
    }  # fmt: skip


def restored(task, split, files):
    """As workers read them: each stage only what it needs."""
    stages = chain(task, split)
    for stage, (first, end) in zip(stages, split, strict=True):
        wanted = stage.layers_needed()
        assert {*range(first, end)} <= {*wanted}
        stage.restore_layers({layer: decode(files[layer]) for layer in wanted})
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
        assert {stage.version for stage in stages} == {steps}
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
        assert [one.digest() for one in again] == [one.digest() for one in undisturbed]
        assert one_step(again, 2) == one_step(undisturbed, 2)
        assert files_of(again) == files_of(undisturbed) != files


def test_the_model_that_comes_with_bamboo_is_restored_too(tmp_path):
    task = small_gpt(tmp_path)
    whole = chain(task, [(0, 4)])
    one_step(whole, 0)
    files = files_of(whole)
    apart = restored(task, [(0, 2), (2, 4)], files)
    assert files_of(apart) == files
    assert one_step(apart, 1) == one_step(restored(task, [(0, 2), (2, 4)], files), 1)


def test_only_the_layers_that_a_worker_writes_are_copied():
    stage = Stage(task_of(), 0, SPLITS[0], CONFIG)
    assert stage.layer_states(only=[4, 1]).keys() == {1, 4}
    state = stage.layer_states(only=[1])[1]
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    one_step([stage], 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors.items())
    assert set(state.names) == {"inner.weight", "inner.bias", "shift", "nothing", "temperature"}
    assert state.names["inner.bias"] == "constant:1.inner.bias"
    assert "constant:1.hidden" in state.tensors


@pytest.mark.parametrize("optimizer", ["AdamW", "plain SGD", "dampening", "numbers in groups"])
def test_copies_that_are_made_while_the_next_step_is_run_are_of_the_state_before(monkeypatch, optimizer):
    monkeypatch.setattr(late_copies, "PIECE_BYTES", 8)
    stage = Stage(task_of(optimizer), 0, SPLITS[0], CONFIG)
    one_step([stage], 0)
    files = files_of([stage])
    late, works = stage.late_copies(range(7)), [begin(stage, 0, 1, 2)]
    pieces = 0
    while not late.done:
        if pieces < 3:
            microbatch([stage], works, 1, pieces)
        late.copy_piece()
        pieces += 1
    assert pieces > 10
    one_step([stage], 1)
    assert {layer: b"".join(encode(state)) for layer, state in late.layers.items()} == files


class Renamed(nn.Linear):
    """Has a value in its state_dict that it does not hold."""

    def __init__(self):
        super().__init__(2, 2)
        self._register_state_dict_hook(self._more)

    @staticmethod
    def _more(module, state, prefix, _):
        state[f"{prefix}doubled"] = 2 * module.weight.detach()


def test_what_only_the_state_dict_has_is_kept_for_its_readers():
    task = small_task(layers=(Renamed,))
    stage = Stage(task, 0, [(0, 1)], CONFIG)
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
    ],
)
def test_states_that_do_not_fit_are_refused_whole(change, message):
    stage = Stage(task_of(), 0, SPLITS[0], CONFIG)
    for k in range(2):
        one_step([stage], k)
    states = {layer: decode(data) for layer, data in files_of([stage]).items()}
    change(states)
    other = Stage(task_of(), 0, SPLITS[0], CONFIG)
    digest = other.digest()
    with pytest.raises(ValueError, match=message):
        other.restore_layers(states)
    assert (other.digest(), other.version) == (digest, 0)


def counting(kind):
    return small_task(layers=LAYERS, optimizer=lambda named: kind([p for _, p in named], lr=0.1))


def test_a_stage_that_is_ahead_goes_back_with_the_numbers_of_its_groups():
    """Also to before the first step, when some of them were not there."""
    task = counting(Averaging)
    stage = Stage(task, 0, SPLITS[0], CONFIG)
    kept = [stage.snapshot()]
    for step in range(3):
        one_step([stage], step)
        kept.append(stage.snapshot())
    digests = []
    for version in (1, 0, 3):
        other = Stage(task, 0, SPLITS[0], CONFIG)
        other.restore(*kept[version])
        stage.restore(*kept[version])
        for step in range(version, 5):
            one_step([stage], step)
            one_step([other], step)
        digests += [stage.digest(), other.digest()]
    assert len(set(digests)) == 1


def test_numbers_that_depend_on_the_split_are_refused_on_another_one_only():
    task = counting(OfWhole)
    stages = chain(task, SPLITS[1])
    one_step(stages, 0)
    states = {layer: decode(data) for layer, data in files_of(stages).items()}
    for index, same in enumerate(chain(task, SPLITS[1])):
        same.restore_layers(states)
        assert same.digest() == stages[index].digest()
    whole = Stage(task, 0, SPLITS[0], CONFIG)
    digest = whole.digest()
    with pytest.raises(ValueError, match=r"'size' of the optimizer's parameter group differs between .*how the layers"):
        whole.restore_layers(states)
    assert (whole.digest(), whole.version) == (digest, 0)


def test_an_optimizer_whose_groups_change_in_what_is_no_number_is_refused_by_name():
    stage = Stage(counting(Listing), 0, SPLITS[0], CONFIG)
    with pytest.raises(TaskError, match="the optimizer changes 'rates' of its parameter groups, which is list"):
        one_step([stage], 0)


def test_an_optimizer_that_mixes_parameters_is_refused_as_ever():
    task = small_task(optimizer=lambda named: torch.optim.LBFGS([p for _, p in named], lr=0.1))
    with pytest.raises(TaskError):
        one_step([Stage(task, 0, [(0, 3)], CONFIG)], 0)
