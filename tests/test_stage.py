"""A chain of stages in one process against plain PyTorch; the bits of repeated, saved and restored work."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bamboo_trainer import reference
from bamboo_trainer.data import TensorDataset, microbatch_samples, permute, step_samples
from bamboo_trainer.loading import layer_costs, load_task
from bamboo_trainer.models import gpt, mlp
from bamboo_trainer.stage import Stage, TaskError, TrainingConfig, Work
from bamboo_trainer.task import Parts, Task

TEXT = bytes(range(32, 127)) * 60
CONFIG = TrainingConfig(seed=3, precision="fp32", max_gradient_norm=0.5, microbatches=3, micro_batch_size=2)
SPLITS = {1: [(0, 4)], 2: [(0, 2), (2, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    return str(path)


def small_gpt(text: str, **config) -> Task:
    return gpt.build({"dModel": 16, "heads": 2, "blocks": 2, "context": 8, "text": text, **config})


def small_task(**changes) -> Task:
    points = torch.arange(24.0).reshape(12, 2)
    task = Task(
        layers=(lambda: nn.Linear(2, 3), nn.Tanh, lambda: nn.Linear(3, 2)),
        loss=lambda outputs, targets: (outputs[0] - targets[0]).square().mean(),
        dataset=TensorDataset((points / 24,), (points.flip(1) / 24,)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        learning_rate=lambda step: 0.1,
    )
    return replace(task, **changes)


def chain(task: Task, split, config=CONFIG) -> list[Stage]:
    return [Stage(task, s, split, config) for s in range(len(split))]


def microbatch(stages: list[Stage], works: list[Work], step: int, index: int) -> list[Parts | None]:
    """Forward and backward through all stages; returns everything that crossed a boundary."""
    crossed: list[Parts | None] = []
    parts: Parts | None = None
    for stage, work in zip(stages, works, strict=True):
        parts = stage.forward(work, step, index, parts)
        crossed.append(parts)
    gradients: Parts | None = None
    for stage, work in zip(reversed(stages), reversed(works), strict=True):
        gradients = stage.backward(work, step, index, gradients)
        crossed.append(gradients)
    return crossed


def reduce_tied(stages: list[Stage], gradients: list[torch.Tensor]) -> None:
    places: dict[int, list[torch.Tensor]] = {}
    for stage, gradient in zip(stages, gradients, strict=True):
        for segment in stage.tied_segments():
            place = gradient[segment.offset : segment.offset + segment.size]
            places.setdefault(segment.group, []).append(place)
    for group in places.values():
        total = torch.stack(group).sum(0)
        for place in group:
            place.copy_(total)


def one_step(stages: list[Stage], step: int, config=CONFIG) -> float:
    works = [s.begin() for s in stages]
    for index in range(config.microbatches):
        microbatch(stages, works, step, index)
    reduce_tied(stages, [w.gradient for w in works])
    norm = math.sqrt(sum(s.norm_squared(w.gradient) for s, w in zip(stages, works, strict=True)))
    for stage, work in zip(stages, works, strict=True):
        stage.apply(work.gradient, norm)
    losses = works[-1].losses
    return sum(losses[i] for i in range(config.microbatches)) / config.microbatches


def state_of(stages: Iterable[Stage]) -> dict[str, torch.Tensor]:
    return {name: tensor for stage in stages for name, tensor in stage.state_tensors().items()}


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-3)])
def test_a_chain_of_stages_trains_like_plain_pytorch(text, stages, tied, precision, tolerance):
    """To the bit; the gradient of parameters tied over stages is summed in another order, hence a tolerance."""
    config = replace(CONFIG, precision=precision, max_gradient_norm=None)
    task = small_gpt(text, dropout=0.1, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=2, steps=6)
    losses, state = reference.train(task, config, 6)
    parts = chain(task, SPLITS[stages], config)
    if tied and stages > 1:
        assert [one_step(parts, k, config) for k in range(6)] == pytest.approx(losses, rel=tolerance)
        torch.testing.assert_close(state_of(parts), state, rtol=tolerance, atol=tolerance)
    else:
        assert [one_step(parts, k, config) for k in range(6)] == losses
        torch.testing.assert_close(state_of(parts), state, rtol=0, atol=0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_clipping_uses_the_norm_over_all_stages(text, stages, tied):
    """Our norm is summed in fp64 and PyTorch's in fp32, so the last bits differ."""
    task = small_gpt(text, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=0)
    task = replace(task, optimizer=lambda named: torch.optim.SGD(named, momentum=0.9))
    losses, state = reference.train(task, CONFIG, 6)
    parts = chain(task, SPLITS[stages])
    assert [one_step(parts, k) for k in range(6)] == pytest.approx(losses, rel=2e-5)
    torch.testing.assert_close(state_of(parts), state, rtol=2e-5, atol=1e-6)
    unclipped, _ = reference.train(task, replace(CONFIG, max_gradient_norm=None), 6)
    assert unclipped != pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("split", [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]])
def test_layers_may_pass_tuples(split):
    task = mlp.build({"width": 8, "blocks": 2, "samples": 64})
    losses, state = reference.train(task, CONFIG, 5)
    stages = chain(task, split)
    assert [one_step(stages, k) for k in range(5)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)


def test_tied_stages_stay_equal_and_count_once(text):
    stages = chain(small_gpt(text, tieEmbeddings=True), SPLITS[4])
    assert [len(s.tied_segments()) for s in stages] == [1, 0, 0, 1]
    assert stages[0].tied_segments()[0].stages == (0, 3)
    ones = [torch.ones(s.size) for s in stages]
    assert (
        sum(s.norm_squared(g) for s, g in zip(stages, ones, strict=True))
        == sum(t.numel() for t in state_of(stages).values()) - 256 * 16
    )
    for k in range(3):
        one_step(stages, k)
    state = state_of(stages)
    assert torch.equal(state["layers.0.token.weight"], state["layers.3.head.weight"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_repeated_microbatch_has_the_same_bits_on_another_holder(text, precision):
    config = replace(CONFIG, precision=precision)
    task = small_gpt(text, dropout=0.2)
    one, two = chain(task, SPLITS[2], config), chain(task, SPLITS[2], config)
    works, again = [s.begin() for s in one], [s.begin() for s in two]
    first = microbatch(one, works, 5, 1)
    torch.rand(17)  # whatever else drew random numbers
    two[0].forward(again[0], 5, 1, None)  # a redundant forward
    second = microbatch(two, again, 5, 1)
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a.gradient, b.gradient) for a, b in zip(works, again, strict=True))
    assert works[-1].losses == again[-1].losses


def test_backwards_of_two_works_do_not_mix(text):
    stage = Stage(small_gpt(text), 0, [(0, 4)], CONFIG)
    alone, other, mixed = stage.begin(), stage.begin(), stage.begin()
    for index in (0, 1):
        microbatch([stage], [alone], 0, index)
    for index in (0, 1):
        microbatch([stage], [mixed], 0, index)
        microbatch([stage], [other], 1, index)
    assert torch.equal(alone.gradient, mixed.gradient)
    assert not torch.equal(alone.gradient, other.gradient)


OPTIMIZERS = {
    "plain SGD": lambda named: torch.optim.SGD(named, lr=0.1),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1),
    "dampening": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda named: torch.optim.AdamW(named, amsgrad=True),
    "Adagrad": lambda named: torch.optim.Adagrad(named, initial_accumulator_value=0.5),
    "NAdam": lambda named: torch.optim.NAdam(named),
    "RMSprop": lambda named: torch.optim.RMSprop(named),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("version", [0, 2])
def test_a_restored_stage_goes_on_with_the_same_bits(name, version):
    task = small_task(optimizer=OPTIMIZERS[name])
    one, two = (Stage(task, 0, [(0, 3)], replace(CONFIG, seed=s)) for s in (3, 4))
    one_step([two], 0)
    for k in range(version):
        one_step([one], k)
    parts, meta = one.snapshot()
    digest = one.digest()
    restored = Stage(task, 0, [(0, 3)], CONFIG)
    for target in (restored, two):
        target.restore(parts, meta)
        assert (target.version, target.digest()) == (version, digest)
    assert one_step([one], version) == one_step([restored], version)
    assert one.digest() == restored.digest() != digest
    untouched = Stage(task, 0, [(0, 3)], CONFIG)
    untouched.restore(parts, meta)
    assert untouched.digest() == digest
    assert reference.train(task, CONFIG, version + 1)[1].keys() == one.state_tensors().keys()
    torch.testing.assert_close(one.state_tensors(), reference.train(task, CONFIG, version + 1)[1], rtol=1e-5, atol=1e-6)


def test_snapshots_have_the_same_parts_at_every_version(text):
    stage = Stage(small_gpt(text), 0, [(0, 4)], CONFIG)
    before = stage.snapshot()
    one_step([stage], 0)
    after = stage.snapshot()
    assert before[1]["names"] == after[1]["names"]
    assert not any(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts, meta: (parts[1:], meta), "holds"),
        (lambda parts, meta: ((parts[0].double(), *parts[1:]), meta), "float64"),
        (lambda parts, meta: ((parts[0][:1], *parts[1:]), meta), "expected"),
        (lambda parts, meta: (parts[:-1], {**meta, "names": meta["names"][:-1]}), "lacks"),
        (lambda parts, meta: ((*parts, parts[0]), {**meta, "names": [*meta["names"], "x"]}), "holds x"),
        (lambda parts, meta: (parts, {**meta, "version": -1}), "version"),
        (lambda parts, meta: (parts, {**meta, "format": 9}), "format"),
        (lambda parts, meta: (parts, {**meta, "scalars": {"state:0.weight:x": 1}}), "holds state"),
    ],
)
def test_a_foreign_snapshot_is_refused_whole(change, message):
    stage = Stage(small_task(), 0, [(0, 3)], CONFIG)
    digest = stage.digest()
    with pytest.raises(ValueError, match=message):
        stage.restore(*change(*stage.snapshot()))
    assert stage.digest() == digest


def test_the_gradient_given_to_apply_is_not_modified():
    stage = Stage(small_task(), 0, [(0, 3)], CONFIG)
    gradient = torch.ones(stage.size)
    stage.apply(gradient, 100.0)
    assert torch.equal(gradient, torch.ones(stage.size))


class Failing(nn.Module):
    def forward(self, x):
        raise RuntimeError("on purpose")


class Unequal(nn.Module):
    def forward(self, x):
        return [x]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (lambda: nn.BatchNorm1d(2),)}, r"layer 0 \(BatchNorm1d\) changes its buffer"),
        (
            {"layers": (lambda: nn.Linear(2, 2), Failing)},
            r"layer 1 \(Failing\) raised RuntimeError: on purpose",
        ),
        ({"layers": (lambda: nn.Linear(2, 2), Unequal)}, r"layer 1 \(Unequal\) must return"),
        ({"layers": (lambda: 3,)}, "layer 0 returned int"),
        ({"layers": (lambda: nn.Linear(2, 2).double(),)}, r"parameter 0.weight is torch.float64"),
        ({"loss": lambda outputs, targets: outputs[0]}, "scalar"),
        ({"optimizer": lambda named: None}, "optimizer returned NoneType"),
        ({"tied": (("0.weight", "2.weight"),)}, "differ"),
        ({"tied": (("0.weight", "2.nothing"),)}, "no parameter 'nothing'"),
        ({"tied": (("0.weight", "9.weight"),)}, "9.weight"),
    ],
)
def test_a_faulty_task_is_told_by_name(changes, message):
    task = small_task(**changes)
    with pytest.raises(TaskError, match=message):
        one_step([Stage(task, 0, [(0, len(task.layers))], CONFIG)], 0)


class WithCount(nn.Module):
    def forward(self, x):
        return x * 2, torch.arange(len(x)), x


class Ignoring(nn.Module):
    def forward(self, parts):
        return parts[0] + parts[1][:, None]


def test_integer_parts_have_no_gradient_and_unused_parts_zeros():
    task = small_task(layers=(lambda: nn.Linear(2, 2), WithCount, Ignoring))
    stages = chain(task, [(0, 1), (1, 2), (2, 3)])
    crossed = microbatch(stages, [s.begin() for s in stages], 0, 0)
    assert len(crossed[1]) == 3
    assert len(crossed[3]) == 2
    assert torch.equal(crossed[3][1], torch.zeros(2, 2))
    torch.testing.assert_close(crossed[4][0], 2 * crossed[3][0])


@given(st.integers(1, 700), st.integers(0, 2**63 - 1))
def test_the_permutation_is_a_bijection(length, key):
    assert sorted(permute(i, length, key) for i in range(length)) == list(range(length))


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_microbatches_make_up_the_step_and_epochs_visit_every_sample_once(seed, length, count, size, step):
    batch = count * size
    parts = [microbatch_samples(seed, step, m, size, batch, length) for m in range(count)]
    assert sum(parts, ()) == step_samples(seed, step, batch, length)
    visited = [i for k in range(-(-2 * length // batch)) for i in step_samples(seed, k, batch, length)]
    assert sorted(visited[:length]) == sorted(visited[length : 2 * length]) == list(range(length))


def test_the_models_learn_and_show_something(text):
    task = load_task("bamboo_trainer.models.mlp:build", {"samples": 256, "blocks": 2, "width": 16})
    config = replace(CONFIG, max_gradient_norm=None, micro_batch_size=32)
    losses, _ = reference.train(task, config, 60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    layers = [factory() for factory in task.layers]
    assert "points on the right spiral" in task.sample(layers)
    language = small_gpt(text)
    assert language.sample([factory() for factory in language.layers]).startswith("def ")
    costs = layer_costs(language, 2)
    assert len(costs) == 4
    assert costs == layer_costs(language, 2)
    assert costs[1] == costs[2] > costs[0] > 0


@pytest.mark.parametrize(
    ("entrypoint", "config", "message"),
    [
        ("nonsense", {}, "module:function"),
        ("no_such_module:build", {}, "cannot import 'no_such_module'"),
        ("bamboo_trainer.models.gpt:nothing", {}, "has no 'nothing'"),
        ("bamboo_trainer.models.gpt:VOCABULARY", {}, "non-callable"),
        ("builtins:dict", {}, "returned dict"),
        ("bamboo_trainer.models.gpt:build", {"nosuch": 1}, "unknown key 'nosuch'"),
        ("bamboo_trainer.models.gpt:build", {"heads": 3, "dModel": 16}, "dModel must be a multiple"),
        ("bamboo_trainer.models.gpt:build", {"heads": "3"}, "heads must be of type int"),
        ("bamboo_trainer.models.gpt:build", {"text": "/nowhere"}, "readable file"),
        ("bamboo_trainer.models.mlp:build", {"width": 0}, "width must be at least 1"),
    ],
)
def test_a_wrong_entrypoint_or_config_gets_one_clear_sentence(entrypoint, config, message):
    with pytest.raises(TaskError, match=message):
        load_task(entrypoint, config)
