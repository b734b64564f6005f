"""Datasets in memory, datasets of rows, and mixtures of several datasets."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.checkpoint.manifest import difference
from bamboo_trainer.data import Indexed, Mixture, TensorDataset, dataset_from
from bamboo_trainer.worker.loaded_job import record_of
from stage_kit import small_task


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def spoiled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"'descr'")
    data[at : at + 60] = b"(" * 60
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(npy()), "it holds a single array"),
        (lambda path: np.savez(path, x=np.float32(1), y=np.zeros(1)), "array 'x' is a single value, expected a row"),
        (lambda path: (np.savez(path, x=np.zeros(3), y=np.zeros(3)), spoiled(path)), "array 'x' cannot be read: "),
    ],
)
def test_arrays_that_are_no_samples_are_told(tmp_path, make, said):
    make(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=f"^data: .*a.npz cannot be used as an .npz file of samples: {said}"):
        dataset_from({"kind": "npz", "path": str(tmp_path / "a.npz"), "inputs": "x", "targets": "y"})


def test_arrays_of_an_npz_file(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6, dtype=np.float64).reshape(3, 2), y=np.arange(3, dtype=np.int32))
    data = dataset_from({"kind": "npz", "path": str(tmp_path / "a.npz"), "inputs": "x", "targets": ["y"]})
    (x,), (y,) = data.batch([2, 0])
    assert x.tolist() == [[4, 5], [0, 1]]
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    with pytest.raises(ValueError, match=r"^data: .*it has x, y, and no array 'z'"):
        dataset_from({"kind": "npz", "path": str(tmp_path / "a.npz"), "inputs": "z", "targets": "y"})
    (tmp_path / "b.npz").write_bytes(b"PK rubbish")
    with pytest.raises(ValueError, match=r"^data: .*b.npz cannot be used as an .npz file"):
        dataset_from({"kind": "npz", "path": str(tmp_path / "b.npz"), "inputs": "x", "targets": "y"})


def numbers(first: int, count: int) -> TensorDataset:
    values = torch.arange(first, first + count)
    return TensorDataset((values[:, None].float(),), (values,))


def taken(mixed: Mixture, *indices: int) -> list[int]:
    (_, (values,)) = mixed.batch(indices)
    return values.tolist()


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 12)), min_size=2, max_size=5))
def test_each_source_has_its_share_and_is_visited_as_a_whole(sources: list[tuple[float, int]]) -> None:
    """A mixture uses each sample of a source equally often, give or take one. Shares are exact to 0.002 per source."""
    mixed = Mixture([(weight, numbers(100 * n, length)) for n, (weight, length) in enumerate(sources)])
    found, whole = Counter(taken(mixed, *range(len(mixed)))), sum(weight for weight, _ in sources)
    for number, (weight, length) in enumerate(sources):
        own = [found[100 * number + sample] for sample in range(length)]
        assert min(own) >= 1
        assert max(own) - min(own) <= 1
        assert abs(sum(own) / len(mixed) - weight / whole) < 0.002 * len(sources)


def test_a_simple_ratio_is_exact_and_spread_evenly() -> None:
    mixed = Mixture([(0.75, numbers(0, 6)), (0.25, numbers(100, 2))])
    assert taken(mixed, *range(len(mixed))) == [0, 1, 100, 2, 3, 4, 101, 5]
    assert len(Mixture([(2, numbers(0, 6)), (1, numbers(100, 1))])) == 9
    assert taken(Mixture([(1, numbers(0, 3)), (1, numbers(100, 2))]), *range(6)) == [0, 100, 1, 101, 2, 100]


def test_samples_come_as_they_were_asked_for() -> None:
    mixed = Mixture([(1, numbers(0, 4)), (0.5, numbers(100, 3))])
    (x,), (values,) = mixed.batch([6, 1, 3, 4])
    assert values.tolist() == [one for index in (6, 1, 3, 4) for one in taken(mixed, index)]
    assert x.flatten().tolist() == values.tolist()
    assert mixed.tokens_per_sample is None


@pytest.mark.parametrize("weight", [0.3001, 0.2])
def test_other_weights_are_other_data(weight: float) -> None:
    def mixed(other: float) -> Any:
        return record_of(small_task(dataset=Mixture([(0.7, numbers(0, 4000)), (other, numbers(0, 500))])), 0)

    assert difference(mixed(0.3), mixed(0.3)) is None
    assert difference(mixed(0.3), mixed(weight)) is not None


def test_columns_of_a_hugging_face_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"ids": [[1, 2, 3], [4, 5, 6]], "label": [0, 1], "odd": [[1], [1, 2]]})
    rows.save_to_disk(str(tmp_path / "rows"))
    config = {"kind": "huggingface", "path": str(tmp_path / "rows"), "inputs": "ids"}
    (ids,), (label,) = dataset_from({**config, "targets": "label"}).batch([1, 0])
    assert ids.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert label.tolist() == [1, 0]
    with pytest.raises(ValueError, match="different shapes in column 'odd'"):
        dataset_from({**config, "targets": "odd"}).batch([0, 1])
    with pytest.raises(ValueError, match="has the columns ids, label, odd, and no 'text'"):
        dataset_from({**config, "targets": "text"})
    datasets.DatasetDict(train=rows).save_to_disk(str(tmp_path / "split"))
    with pytest.raises(ValueError, match="has the splits train; expected one of them as split"):
        dataset_from({**config, "path": str(tmp_path / "split"), "split": "test"})
    assert len(dataset_from({**config, "path": str(tmp_path / "split"), "split": "train", "targets": "label"})) == 2
    with pytest.raises(ValueError, match="is no folder that the library datasets has written"):
        dataset_from({**config, "path": str(tmp_path)})


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([([1], 0), ([1, 2], 0)], "different shapes in part 0"),
        ([(1, 0), ((1, 2), 0)], "different numbers of parts"),
        ([1, 2], "sample 0 is of type int, expected"),
        ([("a", 1), ("b", 1)], "part 0 is of type str, expected numbers"),
        ([{"x": 1}, {"x": 2}], "sample 0 has x, and no 'y'"),
        ([(1j, 1), (1j, 1)], "part 0 has complex numbers"),
    ],
)
def test_samples_that_cannot_be_stacked_are_told(samples, said):
    with pytest.raises(ValueError, match=said):
        Indexed(samples, ("x",), ("y",)).batch([0, 1])


def test_entries_of_a_mapping_have_to_be_named() -> None:
    with pytest.raises(ValueError, match="sample 0 is a mapping with x, y: expected inputs and targets to name which"):
        Indexed([{"x": 1, "y": 2}]).batch([0])
