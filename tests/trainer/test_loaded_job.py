"""The data record of a loaded job, which reveals a changed dataset, and the job's profile."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bamboo_core.checkpoint.manifest import difference
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts
from bamboo_trainer.worker.loaded_job import load_job, record_of
from manifest_kit import bamboojob, mlp_task, training
from stage_kit import small_task


def points(count: int) -> torch.Tensor:
    return torch.arange(2.0 * count).reshape(count, 2)


def of(inputs: torch.Tensor, targets: torch.Tensor | None = None) -> TensorDataset:
    return TensorDataset((inputs,), (inputs if targets is None else targets,))


BEFORE = record_of(small_task(dataset=of(points(400))), 0)


def told(dataset: TensorDataset, seed: int = 0) -> tuple[str, str] | None:
    return difference(BEFORE, record_of(small_task(dataset=dataset), seed))


def test_the_same_data_have_the_same_record() -> None:
    assert record_of(small_task(dataset=of(points(400))), 0) == BEFORE
    assert {0, 399} < {one.sample for one in BEFORE.looked_at}


def test_each_change_is_told() -> None:
    assert told(of(points(300))) == ("400 samples", "300 samples")
    assert told(of(points(401))) == ("400 samples", "401 samples")
    assert told(of(points(400)), seed=1) is not None
    assert told(of(points(400), points(400).long())) == (
        "float32 [2], float32 [2] as sample 0",
        "float32 [2], int64 [2] as sample 0",
    )
    assert told(of(points(400), points(400).flip(0))) is not None, "rows of another order"
    last = points(400)
    last[-1, 0] += 1
    found = told(of(last))
    assert found is not None
    assert found[0].startswith("a sample 399 ")


class Restless:
    """A dataset that draws from an unseeded generator of NumPy or, if `ours`, from torch's global generator."""

    def __init__(self, ours: bool) -> None:
        self.ours = ours

    def __len__(self) -> int:
        return 12

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        noise = torch.rand(len(indices), 2) if self.ours else torch.tensor(np.random.default_rng().random((1, 2)))
        return (noise.float(),), (noise.float(),)


def test_what_is_another_sample_each_time_has_no_digest() -> None:
    record = record_of(small_task(dataset=Restless(ours=False)), 0)
    assert {one.digest for one in record.looked_at} == {""}
    assert {one.form for one in record.looked_at} == {"float32 [2], float32 [2]"}


def test_torchs_generator_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    one, two = (record_of(small_task(dataset=Restless(ours=True)), 0) for _ in range(2))
    assert one == two
    assert "" not in {looked.digest for looked in one.looked_at}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("mode", "known"), [("Auto", True), ("Replicas", False)])
def test_the_profile_of_a_fixed_grid_has_what_the_choice_of_replicas_needs(mode: str, known: bool) -> None:
    grid = {"topology": {"stages": 2, "pipelines": 4}, "redundancy": {"mode": mode}}
    found = load_job(bamboojob(task=mlp_task(), training=training(2, 16, 4), **grid)).profile(1000)
    assert (len(found.layers), found.memory) == ((len(found.costs), 1000) if known else (0, 0))
