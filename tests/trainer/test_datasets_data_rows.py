"""Datasets of rows: columns of the library datasets, and list-like objects."""

import pytest

from bamboo_trainer.data import Indexed, dataset_from


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
