"""The logger for MLflow."""

import pytest
from msgspec.structs import replace

from bamboo_core.history.records import Continuation
from bamboo_trainer.loggers import mlflow
from logger_kit import PATIENCE, evaluated, step

pytest_plugins = ["logger_fixtures"]


@pytest.mark.slow
def test_a_run_of_mlflow_in_a_folder(store, monkeypatch, tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "runs").as_uri()
    for number in range(2):  # the second one goes on in the run of the first
        threads = store.threads(mlflow("experiment", uri), begun=False)
        texts = (Continuation(prompt="def ", text=f"f{number}():"),)
        store.add(None, step(number), replace(evaluated(number), texts=texts))
        threads.begin()
        threads.close(PATIENCE)
    client = tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    written = client.list_artifacts(run.info.run_id, "generation/0")
    assert [one.path for one in written] == [f"generation/0/step-{n}.txt" for n in range(2)]
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) == [0, 1]
