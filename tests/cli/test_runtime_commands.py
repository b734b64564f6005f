"""What commands say of a job that names a runtime: with its file, with the cluster's, and with none."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.names import EXIT_OK, EXIT_USAGE
from remote_command_kit import Fake, type_in
from remote_kit import Asked, Json, job, kubeconfig, server

FIVE_LINES = """
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: story}
spec:
  runtimeRef: {name: spot}
  task: {entrypoint: "bamboo_trainer.models.mlp:build"}
  training: {steps: 3, globalBatchSize: 4, microBatchSize: 2}
"""
RUNTIME = """
apiVersion: bamboo.dev/v1alpha1
kind: ClusterBambooRuntime
metadata: {name: spot}
spec:
  overridable: []
  job:
    elastic: {maxWorkers: 6}
    nodePools: [{name: spot, pricePerHour: "1"}]
"""
SPOT: Json = {
    "apiVersion": "bamboo.dev/v1alpha1",
    "kind": "ClusterBambooRuntime",
    "metadata": {"name": "spot", "uid": "r", "generation": 3},
    "spec": {
        "job": {
            "elastic": {"maxWorkers": 6},
            "nodePools": [{"name": "spot", "pricePerHour": "1"}],
            "budget": {"money": "5"},
        },
        "overridable": [],
        "updates": "NewJobs",
    },
    "status": {},
}


class Cluster(Fake):
    """With a runtime, if it is there."""

    def __init__(self, runtime: Json | None, **more: Any) -> None:
        super().__init__(job(), **more)
        self.runtime = runtime

    def __call__(self, asked: Asked) -> tuple[int, Any]:
        if asked.path.endswith("/clusterbambooruntimes/spot") and self.runtime is not None and not self.forbidden:
            return 200, self.runtime
        return super().__call__(asked)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A job and its runtime, and no cluster."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    manifest, runtime = tmp_path / "job.yaml", tmp_path / "spot.yaml"
    manifest.write_text(FIVE_LINES)
    runtime.write_text(RUNTIME)
    return manifest, runtime


def types(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr


def test_a_job_is_judged_with_the_runtime_that_is_given(files: tuple[Path, Path]) -> None:
    manifest, runtime = files
    code, out, _ = types("validate", manifest, "--runtime", runtime)
    assert code == EXIT_OK
    assert "story is valid: a grid of at most 6 workers" in out
    manifest.write_text(FIVE_LINES + "  elastic: {maxWorkers: 9}\n")
    code, _, err = types("validate", manifest, "--runtime", runtime)
    assert code == EXIT_USAGE
    assert f"{manifest}:9: spec.elastic.maxWorkers: ClusterBambooRuntime spot says it, of which jobs" in err


def test_without_a_cluster_it_is_said_what_was_not_judged(files: tuple[Path, Path]) -> None:
    code, out, _ = types("validate", files[0])
    assert code == EXIT_OK
    assert "story is valid: a grid as its runtime says" in out
    assert "not judged: what ClusterBambooRuntime spot says for it; --runtime FILE gives that (no cluster: " in out
    assert "warning" not in out


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        (SPOT, "story is valid: a grid of at most 6 workers"),
        (None, "not judged: what ClusterBambooRuntime spot says for it; --runtime FILE gives that (there is no"),
        ({**SPOT, "spec": {"job": {"standby": {}}}}, "(ClusterBambooRuntime spot is not valid: spec.job.standby:"),
    ],
)
def test_a_job_is_judged_with_the_runtime_of_the_cluster(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, runtime: Json | None, said: str
) -> None:
    with server(Cluster(runtime)) as (url, asked):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(files[0].parent / "config", url, {"token": "t"})))
        code, out, _ = types("validate", files[0])
    assert (code, {one.method for one in asked}) == (EXIT_OK, {"GET"})
    assert said in out


def test_a_runtime_that_the_job_does_not_name_or_that_is_wrong_ends_the_command(files: tuple[Path, Path]) -> None:
    manifest, runtime = files
    runtime.write_text(RUNTIME.replace("{name: spot}\n", "{name: other}\n"))
    for command in (("validate",), ("run",), ("plan", "--preempt-rate", "0.1", "--device", "a100")):
        code, _, err = types(*command, manifest, "--runtime", runtime)
        assert code == EXIT_USAGE
        assert (
            "spec.runtimeRef: expected ClusterBambooRuntime other, which was given, got ClusterBambooRuntime spot"
            in err
        )
    runtime.write_text(RUNTIME + "    standby: {workers: 1}\n")
    code, _, err = types("validate", manifest, "--runtime", runtime)
    assert code == EXIT_USAGE
    assert f"{runtime}:10: spec.job.standby: unknown field" in err


def test_a_job_is_submitted_if_it_fits_its_runtime_or_has_to_wait_for_it(tmp_path: Path) -> None:
    file = tmp_path / "five.yaml"
    file.write_text(FIVE_LINES)
    code, out, err, asked = type_in(tmp_path, Cluster(SPOT, there=False), "submit", str(file))
    assert (code, err.count("spec.budget.money without spec.checkpoint")) == (EXIT_OK, 1)
    assert "story created" in out
    sent = next(one for one in asked if one.method == "PATCH")
    assert sent.body["spec"]["runtimeRef"] == {"name": "spot"}, "the job itself is not changed"
    code, _, err, _ = type_in(tmp_path, Cluster(None, there=False), "submit", str(file))
    assert code == EXIT_OK
    assert "the job waits for its runtime, or was not judged with it: there is no ClusterBambooRuntime spot yet" in err
    file.write_text(FIVE_LINES + "  elastic: {maxWorkers: 9}\n")
    code, _, err, asked = type_in(tmp_path, Cluster(SPOT, there=False), "submit", str(file))
    assert code == EXIT_USAGE
    assert "of which jobs may override nothing" in err
    assert not [one for one in asked if one.method == "PATCH"]


def test_a_status_says_the_runtime_and_its_workers_are_not_the_jobs_alone(tmp_path: Path) -> None:
    body = job()
    body["spec"]["runtimeRef"] = {"name": "spot"}
    _, out, _, _ = type_in(tmp_path, Fake(body), "status", "story")
    assert "runtime ClusterBambooRuntime spot\n" in out
    body["status"]["runtime"] = {"kind": "ClusterBambooRuntime", "name": "spot", "generation": 3}
    _, out, _, _ = type_in(tmp_path, Fake(body), "status", "story")
    assert "runtime ClusterBambooRuntime spot, generation 3\n" in out
