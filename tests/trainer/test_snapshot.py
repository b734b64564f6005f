"""Saved and restored stages: the same bits, or a refusal that changes nothing."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import reference
from bamboo_trainer.frames.frame import FrameKind
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.stage.state import snapshot
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.transport import wire
from stage_kit import CONFIG, one_step, small_gpt, small_task
from transport_kit import make_frame

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
    one, two = (build_stage(task, 0, [(0, 3)], replace(CONFIG, seed=s)) for s in (3, 4))
    one_step([two], 0)
    for k in range(version):
        one_step([one], k)
    parts, meta = one.values.snapshot()
    digest = one.values.digest()
    restored = build_stage(task, 0, [(0, 3)], CONFIG)
    for target in (restored, two):
        target.values.restore(parts, meta)
        assert (target.values.version, target.values.digest()) == (version, digest)
    assert one_step([one], version) == one_step([restored], version)
    assert one.values.digest() == restored.values.digest() != digest
    untouched = build_stage(task, 0, [(0, 3)], CONFIG)
    untouched.values.restore(parts, meta)
    assert untouched.values.digest() == digest
    assert reference.train(task, CONFIG, version + 1)[1].keys() == one.values.state_tensors().keys()
    torch.testing.assert_close(
        one.values.state_tensors(), reference.train(task, CONFIG, version + 1)[1], rtol=1e-5, atol=1e-6
    )


def test_snapshots_have_the_same_parts_at_every_version(tmp_path):
    stage = build_stage(small_gpt(tmp_path), 0, [(0, 4)], CONFIG)
    before = stage.values.snapshot()
    one_step([stage], 0)
    after = stage.values.snapshot()
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
        (lambda parts, meta: (parts, {**meta, "scalars": {1: 1}}), "mapping of texts"),
        (lambda parts, meta: (parts, {**meta, "scalars": {"state:0.weight:x": "1"}}), "numbers"),
        (lambda parts, meta: (parts, {**meta, "scalars": {"parameter:0.weight": 1}}), "parameter:0.weight twice"),
    ],
)
def test_a_foreign_snapshot_is_refused_whole(change, message):
    stage = build_stage(small_task(), 0, [(0, 3)], CONFIG)
    digest = stage.values.digest()
    with pytest.raises(ValueError, match=message):
        stage.values.restore(*change(*stage.values.snapshot()))
    assert stage.values.digest() == digest


def test_a_digest_is_computed_once_for_each_state(monkeypatch):
    one, other = (build_stage(small_task(), 0, [(0, 3)], replace(CONFIG, seed=s)) for s in (3, 4))
    computed = []
    digest = snapshot.digest
    monkeypatch.setattr(snapshot, "digest", lambda *state: computed.append(1) or digest(*state))
    first = one.values.digest()
    assert one.values.digest() == first
    assert len(computed) == 1
    one_step([one], 0)
    second = one.values.digest()
    assert second != first
    one.values.restore(*other.values.snapshot())
    assert one.values.digest() == other.values.digest() not in (first, second)
    assert len(computed) == 4


class Rotary(nn.Linear):
    """Has a table, as rotary embeddings have one."""

    def __init__(self, dtype=torch.complex64):
        super().__init__(2, 2)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)).to(dtype))


def test_a_complex_table_is_part_of_the_state():
    stage = build_stage(small_task(layers=(Rotary,)), 0, [(0, 1)], CONFIG)
    parts, meta = stage.values.snapshot()
    raw, *body = wire.encode_frame(make_frame(*parts, kind=FrameKind.STATE)).buffers
    header = wire.parse_header(bytes(raw[: wire.HEADER.size]))
    specs, _ = wire.parse_meta(bytes(raw[wire.HEADER.size :]), header.body_length)
    assert [spec.dtype for spec in specs] == [torch.float32, torch.float32, torch.complex64]
    assert bytes(body[-1]) == parts[-1].numpy().tobytes()
    stage.values.restore(parts, meta)


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
def test_a_state_that_cannot_be_sent_is_refused_at_once():
    with pytest.raises(TaskError, match=r"^constant:0.turns is a tensor of torch.float8_e5m2, expected one of"):
        build_stage(small_task(layers=(partial(Rotary, torch.float8_e5m2),)), 0, [(0, 1)], CONFIG)

    class Graph(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("edges", torch.eye(2).to_sparse())

    with pytest.raises(TaskError, match=r"^constant:0.edges is a tensor of layout torch.sparse_coo, expected"):
        build_stage(small_task(layers=(Graph,)), 0, [(0, 1)], CONFIG)


class Small(torch.optim.SGD):
    """Remembers its last gradients in few bits."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad.to(torch.float8_e5m2)


def test_an_optimizer_whose_state_cannot_be_sent_is_refused_after_its_first_step():
    stage = build_stage(small_task(optimizer=lambda named: Small(named, lr=0.1)), 0, [(0, 3)], CONFIG)
    with pytest.raises(TaskError, match=r"^state:0.weight:last is a tensor of torch.float8_e5m2, expected one of"):
        one_step([stage], 0)
