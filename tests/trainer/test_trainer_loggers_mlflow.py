"""The logger for MLflow."""

import pytest

from bamboo_trainer.loggers import mlflow
from logger_kit import PATIENCE, step

pytest_plugins = ["logger_fixtures"]


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
