"""The parser of manifests: specs of valid manifests, and messages about invalid manifests."""

from pathlib import Path
from typing import Any

import pytest

from bamboo_core.job import spec as s
from bamboo_core.job import training_spec as t
from bamboo_core.job.edits import apply_edit_to_manifest
from bamboo_core.job.forms import RESOURCE_NAMES
from bamboo_core.job.manifest import load_manifest, parse_manifest
from manifest_kit import ABSENT, MINIMAL, changed, problems


def test_the_length_of_a_training_in_other_units() -> None:
    epochs, tokens = (
        parse_manifest(changed({"spec.training.steps": ABSENT, f"spec.training.{unit}": amount})).training
        for unit, amount in (("epochs", 3), ("tokens", 1000))
    )
    assert (epochs.length, epochs.known_steps) == ("3 epochs", None)
    assert epochs.with_data(10, None).known_steps == 4  # 30 samples
    assert (tokens.length, tokens.known_steps) == ("1000 tokens", None)
    assert tokens.with_data(10, 4).known_steps == 32  # of 32 tokens each
    with pytest.raises(ValueError, match="the task does not say its tokens_per_sample"):
        tokens.with_data(10, None)


def test_a_five_line_job_gets_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    job = load_manifest(path)
    assert job == s.JobSpec(
        name="tiny",
        task=s.TaskSpec(entrypoint="m:build"),
        training=t.TrainingSpec(steps=10, global_batch_size=8, micro_batch_size=2),
        topology=s.TopologySpec(stages=2, pipelines=1),
    )
    assert job.training.microbatches == 4
    assert (job.namespace, job.redundancy.mode, job.progress_deadline_seconds) == (
        "default",
        "Auto",
        1800,
    )


@pytest.mark.parametrize("topology", [None, {}])
def test_a_job_that_says_only_how_many_workers_it_may_have_leaves_the_grid_to_the_coordinator(topology: Any) -> None:
    document = changed({"spec.topology": topology, "spec.elastic": {"maxWorkers": 9}})
    job = parse_manifest(document)
    assert job.topology == s.TopologySpec(stages=1, pipelines=1, chooses_stages=True, chooses_pipelines=True)
    assert job.elastic == s.ElasticSpec(max_workers=9)
    assert s.most_stages(job) == s.wanted_workers(job) == s.whole_workers(job) == 9
    assert (s.fewest_workers(job), s.most_pipelines(job)) == (1, 4)
    assert s.schedules(job) == ("1F1B", "ZBH1")
    bounds = {"minStages": 2, "maxWorkers": 8, "minWorkers": 4, "objective": "Value"}
    edited = changed({"spec.topology": topology, "spec.elastic": bounds})
    bounded = parse_manifest(edited)
    assert (s.fewest_stages(bounded), s.most_stages(bounded), s.fewest_workers(bounded)) == (2, 8, 4)
    followed = apply_edit_to_manifest(document, edited)
    assert parse_manifest(followed) == bounded, "the bounds may change while the job runs"


@pytest.mark.parametrize(
    ("topology", "elastic", "fewest", "most"),
    [
        ({"stages": 4}, {"maxWorkers": 11}, 4, 8),
        ({"stages": 4}, {"maxWorkers": 99}, 4, 16),
        ({"stages": 4}, {"maxWorkers": 11, "minWorkers": 11}, 8, 8),
        ({"stages": 4}, {"maxWorkers": 11, "minWorkers": 5}, 5, 8),
        ({"split": [1, 1, 2]}, {"maxWorkers": 7}, 3, 6),
        ({"pipelines": 2}, {"maxWorkers": 7}, 2, 6),
        ({"pipelines": 2}, {"maxWorkers": 7, "minStages": 3}, 6, 6),
    ],
)
def test_as_many_workers_are_asked_for_as_a_grid_can_use(
    topology: dict[str, Any], elastic: dict[str, Any], fewest: int, most: int
) -> None:
    """A job with four microbatches requests no more workers than its largest grid can use."""
    job = parse_manifest(changed({"spec.topology": topology, "spec.elastic": elastic}))
    assert (s.fewest_workers(job), s.whole_workers(job)) == (fewest, most)


def test_a_split_says_how_many_stages_there_are() -> None:
    job = parse_manifest(changed({"spec.topology": {"split": [2, 1, 1]}}))
    assert job.topology == s.TopologySpec(stages=3, pipelines=1, split=(2, 1, 1))
    assert job.elastic is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"spec.topology.stages": ABSENT, "spec.elastic.maxWorkers": 8}, ("1F1B", "ZBH1")),
        ({"spec.elastic.maxWorkers": 8}, ("1F1B", "ZBH1")),
        ({"spec.elastic.maxWorkers": 8, "spec.training.compile": True}, ("1F1B", "ZBH1")),
        ({"spec.elastic.maxWorkers": 8, "spec.topology.schedule": "ZBH1"}, ("ZBH1",)),
        ({}, ("1F1B",)),
    ],
)
def test_a_schedule_is_chosen_where_the_grid_is(changes: Any, found: Any) -> None:
    assert s.schedules(parse_manifest(changed(changes))) == found


T, P = "spec.training", "spec.nodePools"
LABEL = "expected a DNS-1123 label (lower-case letters, digits and '-', at most 63 characters)"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("apiVersion", "v1", 'apiVersion: expected "bamboo.dev/v1alpha1", got "v1"'),
        ("kind", "Job", 'kind: expected "BambooJob", got "Job"'),
        ("metadata.name", "My_Job", f'metadata.name: {LABEL}, got "My_Job"'),
        ("metadata.name", "tiny\n", f'metadata.name: {LABEL}, got "tiny\\n"'),
        ("metadata.name", "a" * 64, f'metadata.name: {LABEL}, got "{"a" * 57}..."'),
        ("spec", 3, "spec: expected an object, got 3"),
        ("spec.suspend", "yes", 'spec.suspend: expected true or false, got "yes"'),
        ("spec.task.entrypoint", "m", 'spec.task.entrypoint: expected "module:function", got "m"'),
        ("spec.task", ABSENT, 'spec.task.entrypoint: required, expected "module:function"'),
        ("spec.task.config", [1], "spec.task.config: expected an object, got a list"),
        (
            "spec.task.config",
            {"a": [float("inf")]},
            "spec.task.config.a[0]: expected a finite number, got inf",
        ),
        (
            "spec.task.config",
            {"a": 2**80},
            "spec.task.config.a: expected an integer of 64 bits, got a huge integer",
        ),
        ("spec.task.config", {"a": b""}, "spec.task.config.a: expected a JSON value, got a bytes"),
        (
            "spec.task.config",
            {"a": "x" * 70000},
            "spec.task.config.a: expected at most 65536 characters, got 70000",
        ),
        (
            "spec.task.config",
            {"a": [0] * 20000},
            "spec.task.config.a[9999]: too large, expected at most 10000 values",
        ),
        (f"{T}.steps", "ten", 'spec.training.steps: expected an integer >= 1, got "ten"'),
        (f"{T}.steps", True, "spec.training.steps: expected an integer >= 1, got true"),
        (f"{T}.steps", 2**31, "spec.training.steps: expected an integer <= 2147483647, got 2147483648"),
        (f"{T}.steps", -(2**80), "spec.training.steps: expected an integer >= 1, got a huge integer"),
        (f"{T}.precision", "fp8", 'spec.training.precision: expected one of fp32, bf16, fp16, got "fp8"'),
        (f"{T}.maxGradientNorm", 0, "spec.training.maxGradientNorm: expected a number > 0 and <= 1e9, got 0"),
        (f"{T}.globalBatchsize", 8, f"{T}.globalBatchsize: unknown field, did you mean globalBatchSize?"),
        (f"{T}.xyz", 8, f"{T}.xyz: unknown field"),
        (f"{T}.a b", 8, f'{T}["a b"]: unknown field'),
        ("spec.topology.stages", 1025, "spec.topology.stages: expected an integer <= 1024, got 1025"),
        ("spec.elastic", {}, "spec.elastic.maxWorkers: required, expected an integer >= 1"),
        ("spec.standby.workers", -1, "spec.standby.workers: expected an integer >= 0, got -1"),
        (P, {}, f"{P}: expected a list of at most 16 objects, got an object"),
        (P, [{"name": "p"}] * 17, f"{P}: expected a list of at most 16 objects, got a list"),
        (P, ["spot"], f'{P}[0]: expected an object, got "spot"'),
        (P, [{"name": "a"}, {"name": "a"}], f'{P}[1].name: "a" is already used by {P}[0].name'),
        (
            P,
            [{"name": "a", "pricePerHour": 0.91}],
            f'{P}[0].pricePerHour: expected a decimal number in quotes such as "0.91", got 0.91',
        ),
        (
            "spec.checkpoint.storage",
            "/tmp/x",
            "spec.checkpoint.storage: expected the URL of a store without credentials and parameters, such as "
            "s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder, or pvc://NAME, the name "
            'of a PersistentVolumeClaim, got "/tmp/x"',
        ),
        (
            "spec.worker.resources.limits",
            {"memory": "lots"},
            'spec.worker.resources.limits.memory: expected a Kubernetes quantity, got "lots"',
        ),
        (
            "spec.worker.resources.limits",
            {"gpu": 1},
            f'spec.worker.resources.limits: {RESOURCE_NAMES}, got "gpu"',
        ),
        ("spec.worker.image", "", 'spec.worker.image: expected a container image, got ""'),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_one_problem_one_sentence(path: str, value: Any, problem: str) -> None:
    assert problems(changed({path: value})) == [problem]


def test_all_problems_are_told_at_once() -> None:
    document: Any = changed(
        {
            "metadata.name": 3,
            "spec.training.steps": "ten",
            "spec.training.microBatchSize": 3,
            "spec.stanby": {},
            "spec.topology.stages": "auto",
        }
    )
    document[1] = 2
    assert sorted(problems(document)) == [
        "manifest: expected field names to be strings, got 1",
        f"metadata.name: {LABEL}, got 3",
        "spec.stanby: unknown field, did you mean standby?",
        'spec.topology.stages: expected an integer >= 1, got "auto"',
        "spec.training.globalBatchSize: expected a multiple of spec.training.microBatchSize, got 8 (microBatchSize 3)",
        'spec.training.steps: expected an integer >= 1, got "ten"',
    ]


def test_zero_of_a_resource_is_kept() -> None:
    job = parse_manifest(changed({"spec.worker.resources.limits": {"nvidia.com/gpu": 0}}))
    assert job.worker.resources.limits == {"nvidia.com/gpu": 0}


def test_config_is_bounded_even_when_it_repeats_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    bomb: Any = 0
    for _ in range(12):
        bomb = [bomb] * 10
    first, second = problems(changed({"spec.task.config": {"loop": loop, "bomb": bomb}}))
    assert first.endswith(": nested too deeply, expected at most 16 levels")
    assert second.endswith(": too large, expected at most 10000 values")
