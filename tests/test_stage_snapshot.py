"""Saved and restored stages: the same bits, or a refusal that changes nothing."""

from dataclasses import replace

import pytest
import torch

from bamboo_trainer import reference
from bamboo_trainer.stage import Stage
from stage_kit import CONFIG, one_step, small_gpt, small_task

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


def test_snapshots_have_the_same_parts_at_every_version(tmp_path):
    stage = Stage(small_gpt(tmp_path), 0, [(0, 4)], CONFIG)
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
