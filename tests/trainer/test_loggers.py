"""Loggers get what is in the history, each in a thread of its own; who fails or hangs holds nobody up."""

import pytest

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.manifest_warnings import warnings
from bamboo_trainer.loggers import mlflow, tensorboard, wandb
from logger_kit import PATIENCE, step, until
from manifest_kit import bamboojob, training

pytest_plugins = ["logger_fixtures"]


@pytest.mark.parametrize(("make", "name"), [(wandb, "wandb"), (mlflow, "mlflow"), (tensorboard, "tensorboard")])
def test_a_library_that_is_missing_is_told(store, monkeypatch, make, name):
    for module in (name, f"{name}.tracking", "torch.utils.tensorboard"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    store.add(None, step(0))
    followers = store.followers(make("x"))
    until(lambda: store.told)
    followers.close(PATIENCE)
    assert f"{name} is not installed: pip install 'bamboo-trainer[{name}]'" in store.told[0].message


def test_loggers_without_a_history_are_warned_of():
    logging = training(1, 2, 1, loggers=[{"name": "a", "type": "TensorBoard"}])
    spec = parse_manifest(bamboojob(task={"entrypoint": "m:b"}, training=logging, topology={"stages": 1}))
    assert [text for text in warnings(spec) if text.startswith("spec.training.loggers are given nothing")]
