"""Arrays that are held in memory."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from bamboo_trainer.data import dataset_from


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
