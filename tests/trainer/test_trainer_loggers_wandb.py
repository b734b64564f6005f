"""The logger for Weights & Biases."""

from functools import partial
from pathlib import Path

import pytest

from bamboo_trainer.loggers import wandb
from logger_kit import PATIENCE, step, until

pytest_plugins = ["logger_fixtures"]


@pytest.mark.slow
def test_a_run_of_weights_and_biases_without_a_network(store, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    followers = store.followers(partial(wandb("project")))
    store.add(followers, step(0), step(1))
    until(lambda: (Path(store.url) / "logger-l0.json").exists())
    followers.close(PATIENCE)
    assert list(tmp_path.rglob("run-*.wandb"))
    assert store.told == []
