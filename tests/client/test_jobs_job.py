"""`bamboo.Job`: built from values, checked and printed as a manifest."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import bamboo
from bamboo.job_source import source_of_file
from bamboo.jobs import here
from bamboo.jobs.results import JobProgress
from bamboo_core.names import ENV_DEVICE
from bamboo_trainer.models import mlp
from folders import ROOT
from remote_kit import kubeconfig

TRAINING: Any = {"steps": 60, "globalBatchSize": 16, "microBatchSize": 4}


def quickstart(**parts: Any) -> bamboo.Job:
    said = {"training": TRAINING, "topology": {"stages": 3}, **parts}
    return bamboo.Job("quickstart", task=mlp.build, **said)


def test_a_job_is_the_manifest_that_its_arguments_say() -> None:
    job = bamboo.Job(
        "quickstart",
        task=mlp.build,
        config={"width": 8},
        namespace="team",
        labels={"a": "b"},
        training=TRAINING,
        topology={"stages": 3, "pipelines": 2},
    )
    assert yaml.safe_load(job.to_yaml()) == job.document
    assert job.document == {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "quickstart", "namespace": "team", "labels": {"a": "b"}},
        "spec": {
            "task": {"entrypoint": "bamboo_trainer.models.mlp:build", "config": {"width": 8}},
            "training": TRAINING,
            "topology": {"stages": 3, "pipelines": 2},
        },
    }
    assert (job.name, job.spec.topology.pipelines, job.spec.redundancy.replicas) == ("quickstart", 2, 1)


def test_a_wrong_job_is_refused_with_all_that_is_wrong() -> None:
    with pytest.raises(bamboo.InvalidJob) as told:
        quickstart(training={"stepz": 1, "globalBatchSize": 16, "microBatchSize": 0}, topology={"stages": -1})
    assert str(told.value).split("\n") == [
        "job quickstart: spec.training.stepz: unknown field, did you mean steps?",
        "job quickstart: spec.training.microBatchSize: expected an integer >= 1, got 0",
        "job quickstart: spec.topology.stages: expected an integer >= 1, got -1",
        "job quickstart: spec.training: expected exactly one of steps, epochs and tokens",
    ]
    assert len(told.value.problems) == 4
    assert isinstance(told.value, ValueError | bamboo.BambooError)


def test_a_job_of_a_file_keeps_its_text_and_names_its_lines(tmp_path: Path) -> None:
    path = ROOT / "examples" / "quickstart.yaml"
    assert bamboo.Job.from_file(path).to_yaml() == path.read_text()
    wrong = tmp_path / "job.yaml"
    wrong.write_text(quickstart().to_yaml().replace("steps:", "stepz:"))
    with pytest.raises(bamboo.InvalidJob, match=rf"{wrong}:\d+: spec.training.stepz: unknown field"):
        bamboo.Job.from_file(wrong)
    with pytest.raises(bamboo.InvalidJob, match="no such file"):
        bamboo.Job.from_file(tmp_path / "missing.yaml")


def test_what_workers_cannot_import_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(config: Any) -> Any:
        return mlp.build(config)

    for function in (inner, lambda config: mlp.build(config)):
        with pytest.raises(bamboo.InvalidRequest, match="task: expected a function at the top level of a module"):
            bamboo.Job("x", task=function, training=TRAINING, topology={"stages": 2})

    def build(config: Any) -> Any:
        return mlp.build(config)

    build.__module__, build.__qualname__ = "__main__", "build"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a notebook
    with pytest.raises(bamboo.InvalidRequest, match=r"%%writefile my_task.py, .* task=my_task.build"):
        bamboo.Job("x", task=build, training=TRAINING, topology={"stages": 2})


def test_a_value_that_no_manifest_can_have_is_refused() -> None:
    with pytest.raises(bamboo.InvalidRequest, match="expected numbers, texts, lists and mappings"):
        bamboo.Job("x", task=mlp.build, config={"x": object()}, training=TRAINING, topology={"stages": 2})


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (
            {"resources": {"limits": {"nvidia.com/gpu": 1}}},
            "spec.worker.resources asks for GPUs, and torch can use none",
        ),
        ({"devices": 2}, "spec.worker.devices 2 asks for GPUs, and torch can use none on this machine: the workers"),
        ({"resources": {"limits": {"nvidia.com/gpu": 0, "cpu": 1}}}, None),
    ],
)
def test_gpus_that_this_machine_does_not_have_are_told_once(
    worker: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(here, "_torch_may_use_gpus", lambda: False)
    monkeypatch.delenv(ENV_DEVICE, raising=False)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(quickstart(worker=worker).document))
    source = source_of_file(str(tmp_path / "job.yaml"))
    _, warnings = here.on_this_machine(source, checkpoints=None, resume=None)
    assert [warning[: len(said or "")] for warning in warnings] == ([said] if said else [])
    monkeypatch.setenv(ENV_DEVICE, "cpu")
    assert here.on_this_machine(source, checkpoints=None, resume=None)[1] == []


def test_a_simulation_and_a_plan_are_what_the_command_line_finds() -> None:
    job = bamboo.Job(
        "bert",
        task="bamboo_trainer.models.bert:build",
        config={"data": {"length": 512}, "size": "large"},
        training={"steps": 30, "globalBatchSize": 32, "microBatchSize": 1},
        topology={"stages": 12},
    )
    found = job.simulate(profile="bert-v100", preempt_rate=0.5, seeds=2, hours=0.5, jobs=1)
    assert list(found.cases) == ["0.5"]
    assert found.cases["0.5"].runs == len(found.runs) == 2
    assert {run["outcome"] for run in found.runs} <= {"Complete", "cut"}
    assert str(found).startswith("CASE  RUNS  PREEMPTIONS")
    plan = job.plan(profile="bert-v100", preempt_rate=0.1, hours=0.2, seeds=1, nodes=3, jobs=1)
    assert plan.recommended is not None
    chosen = plan.to_dict()["recommended"]["plan"]
    assert (plan.recommended.spec.topology.stages, len(plan.options) > 0) == (chosen["stages"], True)
    assert str(plan).startswith("PLAN  TIME")
    with pytest.raises(bamboo.InvalidRequest, match="preempt_rate or trace: expected one of them"):
        job.simulate(profile="bert-v100")
    with pytest.raises(bamboo.InvalidRequest, match="cannot read the profile nothing"):
        job.simulate(profile="nothing", preempt_rate=0.1)


@pytest.mark.parametrize(
    ("parts", "arguments", "told"),
    [
        ({}, {"preempt": "never"}, "preempt never: expected none, random:RATE"),
        ({}, {"resume": True}, "resume: the job keeps no checkpoints; checkpoints URL says"),
        ({"suspend": True}, {}, "spec.suspend: the job is suspended"),
    ],
)
def test_arguments_that_do_not_fit_are_told_by_their_names(parts: Any, arguments: Any, told: str) -> None:
    with pytest.raises(bamboo.InvalidRequest, match=f"^{told}"):
        quickstart(**parts).run(**arguments)


def test_overwriting_the_fields_of_others_needs_an_apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", "http://127.0.0.1:1")))
    with pytest.raises(bamboo.InvalidRequest, match=r"^force: expected together with apply$"):
        quickstart().submit(force=True)


def test_importing_bamboo_imports_nothing_else() -> None:
    """`import bamboo` loads none of its modules, nor torch or yaml: slow imports would delay the command line."""
    asked = "import sys, bamboo; print([name for name in sys.modules if name.startswith(('bamboo.', 'torch', 'yaml'))])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert set(bamboo.__all__) <= set(dir(bamboo))
    for name in bamboo.__all__:
        assert getattr(bamboo, name).__name__ == name
    with pytest.raises(AttributeError, match="'bamboo' has no attribute 'Jbo'"):
        _ = bamboo.Jbo


def test_progress_is_a_line() -> None:
    assert str(JobProgress(name="x", state="Starting")) == "x: Starting, step 0/?"
    far = JobProgress(name="x", state="Running", step=3, steps=9, loss=0.25, samples_per_second=2.0, eta_seconds=90)
    assert str(far) == "x: Running, step 3/9, loss 0.2500, 2.0 samples/s, ETA 1:30"
