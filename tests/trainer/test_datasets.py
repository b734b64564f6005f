"""Images, arrays, columns and samples of one's own, by what a manifest says of them."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bamboo_trainer.data import Indexed, Prefetched, dataset_from, open_sources
from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.task_errors import TaskError


def painted(folder: Path, names: dict[str, tuple[int, int, int]], size=(40, 30)) -> Path:
    Image = pytest.importorskip("PIL.Image")
    for name, colour in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", size, colour)
        image.paste((255, 255, 255), (0, 0, size[0] // 2, size[1]))  # so that a mirror image differs
        image.save(path)
    return folder


COLOURS = {"dog/a.png": (255, 0, 0), "cat/deep/b.png": (0, 255, 0), "cat/c.PNG": (0, 0, 255)}


def test_images_have_the_class_of_their_folder(tmp_path):
    folder = painted(tmp_path, COLOURS)
    (tmp_path / "notes.txt").write_text("no image")
    config = {"kind": "images", "path": str(folder), "size": 8, "mean": [0, 0, 0], "std": [1, 1, 1]}
    data = dataset_from(config)
    assert data.classes == ("cat", "dog")
    (images,), (targets,) = data.batch([0, 1, 2])
    assert images.shape == (3, 3, 8, 8)
    assert targets.tolist() == [0, 0, 1]
    assert images[:, :, 4, 7].tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert torch.equal(images[:, :, 4, 0], torch.ones(3, 3))


def test_augmentation_depends_on_the_samples_number_alone(tmp_path):
    folder = painted(tmp_path, COLOURS)
    config = {"kind": "images", "path": str(folder), "size": 8, "augment": True, "variants": 6}
    data = dataset_from(config)
    assert len(data) == 18
    (images,), (targets,) = data.batch(range(18))
    (again,), _ = dataset_from(config).batch(list(range(17, -1, -1)))
    assert torch.equal(images, again.flip(0))
    assert targets.tolist() == [0] * 12 + [1] * 6
    assert len({image.numpy().tobytes() for image in images[:6]}) > 2


def test_what_is_no_image_is_named(tmp_path):
    folder = painted(tmp_path, {"a/x.png": (1, 2, 3)})
    (folder / "a" / "y.png").write_bytes(b"rubbish")
    data = dataset_from({"kind": "images", "path": str(folder)})
    data.batch([0])
    with pytest.raises(ValueError, match=r"y\.png is no image that can be read"):
        data.batch([1])
    (folder / "stray.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"data: .*stray.png is in no folder of a class"):
        dataset_from({"kind": "images", "path": str(folder)})


def test_classes_are_the_folders_also_where_one_has_no_image(tmp_path):
    folder = painted(tmp_path, {"cat/a.png": (1, 2, 3), "eel/b.png": (1, 2, 3)})
    (folder / "dog").mkdir()
    config = {"kind": "images", "path": str(folder), "size": 8}
    with pytest.raises(ValueError, match=r"^data: .*/dog has no image, so it is no class"):
        dataset_from(config)
    data = dataset_from({**config, "classes": ["cat", "dog", "eel"]})
    assert data.batch([0, 1])[1][0].tolist() == [0, 2]
    with pytest.raises(ValueError, match="images of a class 'eel', which is none of classes: cat, dog"):
        dataset_from({**config, "classes": ["cat", "dog"]})
    with pytest.raises(ValueError, match="classes must be different names"):
        dataset_from({**config, "classes": ["cat", "eel", "cat"]})


def test_a_link_that_leads_back_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").touch()
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    names = [source.name for source in open_sources(str(tmp_path), (".txt",)).files]
    assert names == [f"{tmp_path}/a/x.txt", f"{tmp_path}/b/x.txt"]


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


def test_columns_of_a_hugging_face_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"ids": [[1, 2, 3], [4, 5, 6]], "label": [0, 1], "odd": [[1], [1, 2]]})
    rows.save_to_disk(str(tmp_path / "rows"))
    config = {"kind": "huggingface", "path": str(tmp_path / "rows"), "inputs": "ids"}
    (ids,), (label,) = dataset_from({**config, "targets": "label"}).batch([1, 0])
    assert ids.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert label.tolist() == [1, 0]
    (ids,), (later,) = dataset_from({**config, "nextToken": True}).batch([0])
    assert (ids.tolist(), later.tolist()) == ([[1, 2]], [[2, 3]])
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


OWN = """
import numpy as np

class Samples:
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, i): return np.full(3, i), i

class Named(Samples):
    def __getitem__(self, i): return {"x": [i, i + 1], "mask": True, "y": i / 2}

def build(config): return Samples(config["size"])
def named(config): return Named(4)
def wrong(config): return 7
"""


def test_an_entrypoint_gives_samples_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_samples.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    data = dataset_from({"kind": "own", "entrypoint": "own_samples:build", "config": {"size": 5}, "readers": 3})
    assert isinstance(data, Prefetched)
    assert (len(data), data.readers, data.ahead, data.processes) == (5, 3, 6, True)
    (x,), (y,) = data.batch([1, 4])
    assert (x.tolist(), y.tolist(), x.dtype) == ([[1, 1, 1], [4, 4, 4]], [1, 4], torch.int64)
    named = dataset_from({"kind": "own", "entrypoint": "own_samples:named", "inputs": ["x", "mask"], "targets": "y"})
    (x, mask), (y,) = named.batch([0, 2])
    assert (x.tolist(), mask.tolist(), y.tolist()) == ([[0, 1], [2, 3]], [True, True], [0.0, 1.0])
    sys.modules.pop("own_samples")
    with pytest.raises(ValueError, match=r"^data: entrypoint: own_samples:wrong returned int, expected samples with"):
        dataset_from({"kind": "own", "entrypoint": "own_samples:wrong"})


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


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], r"data must be a mapping with kind and its keys, got \[\]"),
        ({}, r"data.kind is missing"),
        ({"kind": "x"}, r"data.kind must be one of tokens, text, images, npz, huggingface, own, got 'x'"),
        ({"kind": "tokens", "length": 8}, "data.path is missing"),
        ({"kind": "tokens", "path": "/nowhere", "length": "8"}, "data.length must be a whole number, got '8'"),
        ({"kind": "tokens", "path": "/nowhere", "length": 8}, "data: cannot read /nowhere: there is no such file"),
        ({"kind": "tokens", "path": "ftp://x", "length": 8}, "data: the path or URL of data ftp://x: nothing is known"),
        ({"kind": "text", "length": 8, "lenght": 8}, "data: unknown key 'lenght' for kind text, expected some of kind"),
        ({"kind": "text", "length": 8, "readers": True}, "data.readers must be a whole number, got True"),
        ({"kind": "text", "length": 8, "readAhead": 2}, "data: readAhead and threads: expected together with readers"),
        ({"kind": "text", "path": "/nowhere", "length": 8}, "data: path must be stdlib or a readable file"),
        ({"kind": "images", "path": "/", "std": [1, 0]}, r"data.std must be three numbers, got \[1, 0\]"),
        (
            {"kind": "tokens", "path": "/", "length": 8, "cache": {"gigabytes": float("inf")}},
            "data.cache.gigabytes must",
        ),
        ({"kind": "tokens", "path": "/", "length": 8, "cache": {"gigabytes": 10**400}}, "data.cache.gigabytes must"),
        ({"kind": "tokens", "path": "/", "length": 8, "cache": {"gigabytes": -1}}, "cache.gigabytes must be at least"),
        ({"kind": "images", "path": "/", "leastArea": float("nan")}, "data.leastArea must be a finite number, got nan"),
        ({"kind": "own", "entrypoint": "json"}, 'data: entrypoint must be "module:function"'),
        ({"kind": "own", "entrypoint": "json:nothing"}, "data: entrypoint: json has no function 'nothing'"),
    ],
)
def test_a_wrong_config_is_one_sentence(config, said):
    with pytest.raises(ValueError, match=said):
        dataset_from(config)


def test_the_sentence_reaches_who_runs_a_job(tmp_path, monkeypatch):
    (tmp_path / "own_task.py").write_text(
        "from bamboo_trainer.data import dataset_from\ndef build(config): return dataset_from(config['data'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=r"^task.config: data.length is missing"):
        load_task("own_task:build", json.loads('{"data": {"kind": "text"}}'))
