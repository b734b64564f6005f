"""The loggers for TensorBoard, MLflow and Weights & Biases."""

import sys
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from bamboo_trainer.loggers import mlflow, tensorboard, wandb
from logger_kit import evaluated, step
from waiting import PATIENCE, until

pytest_plugins = ["logger_kit"]


def read_back(folder: str) -> dict[str, list[tuple[int, float]]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_as_it_was_done_last(store, tmp_path):
    pytest.importorskip("tensorboard")
    first = store.followers(tensorboard())
    store.add(first, *(step(number, metrics={"accuracy": 0.25}) for number in range(1, 7)), evaluated(6, x=0.5))
    until(lambda: (Path(store.url) / "logger-l0.json").exists())
    first.close(PATIENCE)
    second = store.followers(tensorboard(), leads=False)
    store.add(None, *(step(number, 2) for number in range(5, 9)))  # the job went back to step 4
    second.lead(True)
    second.close(PATIENCE)
    found = read_back(f"{store.url}/tensorboard")
    assert found["loss"] == [(s, pytest.approx(1 / (s + (1 if s < 5 else 2)))) for s in range(1, 9)]
    assert found["accuracy"][0] == (1, 0.25)
    assert store.told == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_evaluation_is_at_its_step_and_takes_no_step_away(store):
    """If a job goes back to step 2, TensorBoard gets all steps, and the evaluation of step 2 again."""
    pytest.importorskip("tensorboard")
    followers = store.followers(tensorboard(), leads=False)
    store.add(None, step(1), step(2), evaluated(2, x=0.5), step(3))
    again = replace(evaluated(2, x=0.5), attempt=2)
    store.add(None, again, step(3, 2), step(4, 2), replace(evaluated(4, x=0.25), attempt=2))
    followers.lead(True)
    followers.close(PATIENCE)
    found = read_back(f"{store.url}/tensorboard")
    assert found["loss"] == [(1, 0.5), (2, pytest.approx(1 / 3)), (3, pytest.approx(0.2)), (4, pytest.approx(1 / 6))]
    assert found["evaluation/x"] == [(2, 0.5), (2, 0.5), (4, 0.25)]
    assert store.told == []


@pytest.mark.slow
def test_a_run_of_mlflow_in_a_folder(store, monkeypatch, tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "runs").as_uri()
    for number in range(2):  # the second one goes on in the run of the first
        followers = store.followers(mlflow("experiment", uri), leads=False)
        store.add(None, step(number))
        followers.lead(True)
        followers.close(PATIENCE)
    client = tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) == [0, 1]


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


@pytest.mark.parametrize(("make", "name"), [(wandb, "wandb"), (mlflow, "mlflow"), (tensorboard, "tensorboard")])
def test_a_library_that_is_missing_is_told(store, monkeypatch, make, name):
    for module in (name, f"{name}.tracking", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    store.add(None, step(0))
    followers = store.followers(make("x"))
    until(lambda: store.told)
    followers.close(PATIENCE)
    assert f"{name} is not installed: pip install 'bamboo-trainer[{name}]'" in store.told[0].message
