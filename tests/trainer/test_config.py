"""Datasets described by a manifest, and refused configs."""

import json
import sys

import pytest
import torch

from bamboo_trainer.data import Prefetched, dataset_from
from bamboo_trainer.data.datasets import MOST_AHEAD, MOST_READERS
from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.task_errors import TaskError

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
    assert (len(data), data.readers, data.ahead) == (5, 3, 6)
    (x,), (y,) = data.batch([1, 4])
    assert (x.tolist(), y.tolist(), x.dtype) == ([[1, 1, 1], [4, 4, 4]], [1, 4], torch.int64)
    named = dataset_from({"kind": "own", "entrypoint": "own_samples:named", "inputs": ["x", "mask"], "targets": "y"})
    (x, mask), (y,) = named.batch([0, 2])
    assert (x.tolist(), mask.tolist(), y.tolist()) == ([[0, 1], [2, 3]], [True, True], [0.0, 1.0])
    sys.modules.pop("own_samples")
    with pytest.raises(ValueError, match=r"^data: entrypoint: own_samples:wrong returned int, expected samples with"):
        dataset_from({"kind": "own", "entrypoint": "own_samples:wrong"})


TEXT = {"kind": "text", "length": 8}
MIXTURE, SOURCE = {"kind": "mixture"}, {**TEXT, "weight": 1}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], r"data must be a mapping with kind and its keys, got \[\]"),
        ({}, r"data.kind must be one of tokens, .*, got None"),
        ({"kind": "x"}, r"data.kind must be one of tokens, text, npz, huggingface, own, mixture, got 'x'"),
        ({"kind": "tokens", "length": 8}, "data: path is missing"),
        ({"kind": "tokens", "path": "/nowhere", "length": "8"}, "data: length must be a whole number, got '8'"),
        ({"kind": "tokens", "path": "/nowhere", "length": 8}, "data: cannot read /nowhere: there is no such file"),
        ({"kind": "tokens", "path": "ftp://x", "length": 8}, "data: the path or URL of data ftp://x: nothing is known"),
        ({"kind": "text", "length": 8, "lenght": 8}, "data: unknown key 'lenght', did you mean length?"),
        ({"kind": "text", "length": 8, "readers": True}, "data: readers must be a whole number, got True"),
        ({"kind": "text", "length": 8, "readAhead": 2}, "data: readAhead: expected together with readers"),
        ({"kind": "text", "path": "/nowhere", "length": 8}, "data: path must be stdlib or a readable file"),
        ({"kind": "own", "entrypoint": "json"}, 'data: entrypoint must be "module:function"'),
        ({"kind": "own", "entrypoint": "json:nothing"}, "data: entrypoint: json has no function 'nothing'"),
        (TEXT | {"readers": -1}, f"readers must be from 1 to {MOST_READERS}, got -1"),
        (TEXT | {"readers": MOST_READERS + 1}, f"readers must be from 1 to {MOST_READERS}, got"),
        (TEXT | {"readers": 1, "readAhead": MOST_AHEAD + 1}, f"readAhead must be from 1 to {MOST_AHEAD}, got"),
        (MIXTURE, "data.sources must be a list of mappings, got None"),
        (MIXTURE | {"sources": [1]}, r"data.sources must be a list of mappings, got \[1\]"),
        (MIXTURE | {"sources": [TEXT]}, r"data.sources\[0\].weight must be a finite number, got None"),
        (MIXTURE | {"sources": [SOURCE]}, "data: a mixture must have at least two sources"),
        (MIXTURE | {"sources": [{"kind": "text", "weight": 1}]}, r"data.sources\[0\]: length is missing"),
        (MIXTURE | {"sources": [SOURCE | {"readers": 2}]}, r"data.sources\[0\].readers: expected"),
        (MIXTURE | {"sources": [MIXTURE | {"weight": 1}]}, r"data.sources\[0\].kind: a mixture cannot be"),
        (MIXTURE | {"sources": [SOURCE | {"name": "a"}]}, r"data.sources\[0\]: unknown key 'name'"),
        (MIXTURE | {"sources": [SOURCE, SOURCE | {"weight": 0}]}, "the weight of source 1 must"),
        (MIXTURE | {"sources": [SOURCE, SOURCE | {"length": 9}]}, r"int64 \[8\] of source 0, int64 \[9\]"),
        (MIXTURE | {"sources": [SOURCE] * 2, "ends": "longest"}, "data: unknown key 'ends'"),
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
    with pytest.raises(TaskError, match=r"^task.config: data: length is missing"):
        load_task("own_task:build", json.loads('{"data": {"kind": "text"}}'))
