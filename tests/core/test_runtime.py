"""A job with its runtime: what a runtime may say, what a job has of it, and who is told what is wrong."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.model import Mark, api_fields, part_paths
from bamboo_core.job.pod_template import merge, two_templates
from bamboo_core.job.runtime import (
    PATHS,
    Runtime,
    followed,
    parse_runtime,
    told_with,
    with_runtime,
    with_written_runtime,
    written_runtime,
)
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus, read_status
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.view.job_view import view_of
from manifest_kit import bamboojob, minimal, training

POOLS = [{"name": "spot", "preset": "Karpenter", "pricePerHour": "0.91"}]
SPOT: dict[str, Any] = {
    "elastic": {"maxWorkers": 8, "objective": "Value"},
    "nodePools": POOLS,
    "checkpoint": {"storage": {"uri": "s3://bucket/jobs/"}, "everySteps": 50},
    "worker": {
        "image": "team/trainer:1",
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
        "template": {
            "spec": {
                "tolerations": [{"key": "gpu"}],
                "containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}],
                "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            }
        },
    },
    "queue": {"name": "team"},
    "budget": {"money": "100", "moneyPerHour": "9"},
    "failurePolicy": {"rules": [{"name": "oom", "onExitCodes": [137], "action": "FailJob"}]},
    "activeDeadlineSeconds": 86400,
    "ttlSecondsAfterFinished": 60,
}
FIVE_LINES = {
    "runtimeRef": {"name": "spot"},
    "task": {"entrypoint": "a.b:build"},
    "training": training(100, 32, 4),
}


def runtime(job: dict[str, Any], generation: int = 1, **spec: Any) -> Runtime:
    return parse_runtime(
        {
            "apiVersion": "bamboo.dev/v1alpha1",
            "kind": "ClusterBambooRuntime",
            "metadata": {"name": "spot", "generation": generation},
            "spec": {"job": job, **spec},
        }
    )


def test_another_version_of_the_api_is_refused() -> None:
    document = runtime({"worker": {"image": "trainer"}}).document()
    with pytest.raises(ManifestError, match=r'expected "bamboo.dev/v1alpha1", got "v1"'):
        parse_runtime({**document, "apiVersion": "v1"})


def job(**spec: Any) -> dict[str, Any]:
    return bamboojob("story", namespace="team", **{**FIVE_LINES, **spec})


def told(document: dict[str, Any], by: Runtime) -> list[str]:
    """What is wrong with a job and its runtime."""
    try:
        made = with_runtime(document, by)
    except ManifestError as error:
        return [str(problem) for problem in error.problems]
    with pytest.raises(ManifestError) as caught:
        parse_manifest(made)
    return [str(problem) for problem in told_with(caught.value, document, by).problems]


def test_a_runtime_may_say_what_the_api_server_leaves_absent_and_nothing_that_numbers_depend_on() -> None:
    assert set(PATHS) >= {"nodePools", "worker.image", "worker.template", "worker.resources.limits", "queue"}
    assert set(PATHS) >= {"checkpoint", "budget.money", "elastic.maxWorkers", "ttlSecondsAfterFinished"}
    assert not [
        path for path in PATHS if path.split(".")[0] in ("task", "training", "topology", "suspend", "managedBy")
    ]
    assert "runtimeRef" not in PATHS
    numbers = {one.name for one in api_fields(TrainingSpec) if Mark.NO_NUMBERS not in one.marks}
    assert numbers.isdisjoint(part_paths(JobSpec))


def test_a_job_of_five_lines_has_the_rest_of_its_runtime() -> None:
    document = job()
    alone = parse_manifest(document)
    assert (str(alone.runtime_ref), alone.node_pools) == ("ClusterBambooRuntime spot", ())
    made = parse_manifest(with_runtime(document, runtime(SPOT)))
    assert made == parse_manifest(
        bamboojob(
            "story",
            namespace="team",
            task=FIVE_LINES["task"],
            training=FIVE_LINES["training"],
            **{**SPOT, "checkpoint": {"storage": {"uri": "s3://bucket/jobs/team/story"}, "everySteps": 50}},
        )
    )
    assert numbers_digest(made) == numbers_digest(alone)


def test_what_a_job_says_counts_and_of_pods_and_resources_both_do() -> None:
    own = {
        "image": "mine:2",
        "resources": {"limits": {"memory": "8Gi"}, "requests": {"cpu": 4}},
        "template": {
            "metadata": {"labels": None},
            "spec": {
                "tolerations": [{"key": "gpu"}, {"key": "mine"}],
                "containers": [{"name": "trainer", "env": [{"name": "B", "value": "2"}]}],
                "volumes": [{"name": "more", "emptyDir": {}}],
            },
        },
    }
    made = with_runtime(job(worker=own, nodePools=[], budget={"doneBy": "2026-12-24T18:00:00Z"}), runtime(SPOT))["spec"]
    assert (made["worker"]["image"], made["nodePools"]) == ("mine:2", [])
    assert made["worker"]["resources"] == {
        "limits": {"nvidia.com/gpu": 1, "memory": "8Gi"},
        "requests": {"cpu": 4},
    }
    spec = made["worker"]["template"]["spec"]
    assert spec["tolerations"] == [{"key": "gpu"}, {"key": "mine"}]
    assert spec["containers"] == [
        {"name": "trainer", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    ]
    assert [volume["name"] for volume in spec["volumes"]] == ["data", "more"]
    assert made["worker"]["template"]["metadata"] == {"labels": None}
    assert made["budget"] == {"money": "100", "moneyPerHour": "9", "doneBy": "2026-12-24T18:00:00Z"}
    assert "runtimeRef" not in made


def _unmerged(value: dict[str, Any]) -> dict[str, Any]:
    """Without what is merged by name."""
    return {name: inner for name, inner in value.items() if name not in ("template", "resources")}


OTHER = {
    **SPOT,
    "elastic": {"maxWorkers": 2, "objective": "Throughput", "minPipelines": 1, "maxPipelines": 2, "maxStages": 2},
    "nodePools": [{"name": "other", "pricePerHour": "1"}],
    "worker": {"image": "other:1"},
    "checkpoint": {"storage": {"persistentVolumeClaim": {"claimName": "x"}}},
    "budget": {"money": "1", "doneBy": "2026-12-24T18:00:00Z"},
    "queue": {"name": "other"},
    "activeDeadlineSeconds": 1,
}


@given(st.sets(st.sampled_from(sorted(SPOT))), st.sets(st.sampled_from(sorted(OTHER))))
def test_each_field_is_the_jobs_if_it_says_it_and_else_the_runtimes(given_by: set[str], said: set[str]) -> None:
    part = {name: SPOT[name] for name in given_by if name != "budget"}
    own = {name: OTHER[name] for name in said if name != "budget"}
    part |= {"worker": _unmerged(SPOT["worker"])} if "worker" in part else {}
    document = job(**deepcopy(own))
    made, before = with_runtime(document, runtime(part))["spec"], deepcopy(document)
    assert document == before
    for name, value in own.items():
        assert made[name] == ({**part.get(name, {}), **value} if name in ("elastic", "worker") else value)
    for name in part.keys() - own.keys() - {"checkpoint"}:
        assert made[name] == part[name]
    without = {name: value for name, value in document["spec"].items() if name != "runtimeRef"}
    assert with_runtime(document, runtime({}))["spec"] == without
    if part.keys() <= own.keys():
        assert made == without, "a job without gaps is as it was"


NAMES = st.sampled_from(["a", "b", "c"])
ITEMS = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"value": NAMES, "args": st.lists(NAMES)}),
    max_size=3,
    unique_by=lambda item: item["name"],
)
PODS = st.fixed_dictionaries(
    {},
    optional={
        "env": ITEMS,
        "containers": ITEMS,
        "volumes": ITEMS,
        "nodeSelector": st.dictionaries(NAMES, NAMES),
        "hostNetwork": st.booleans(),
        "labels": st.dictionaries(NAMES, st.one_of(NAMES, st.none())),
        "annotations": st.none(),
    },
)


@given(PODS.map(lambda pod: merge({}, pod)), PODS, PODS)
def test_two_templates_in_one_do_to_a_pod_what_they_do_one_after_the_other(
    pod: dict[str, Any], lower: dict[str, Any], upper: dict[str, Any]
) -> None:
    assert merge(pod, two_templates(lower, upper)) == merge(merge(pod, lower), upper)


@pytest.mark.parametrize("strange", [3, "x", [3], [{"key": 1}], {"spec": 3}, {"spec": {"containers": [3]}}])
def test_a_template_that_is_none_stays_for_the_parser_to_judge(strange: Any) -> None:
    assert two_templates({"spec": {"containers": [{"name": "trainer"}]}}, strange) is not None


def test_what_jobs_may_not_override_is_refused_by_name() -> None:
    fixed = runtime(SPOT, overridable=["worker.image", "budget.doneBy"])
    own = {"image": "mine:2", "resources": {"limits": {"memory": "8Gi"}}}
    assert told(job(worker=own, queue={"name": "team"}, budget={"money": "200"}), fixed) == [
        "spec.worker.resources.limits: ClusterBambooRuntime spot says it, of which jobs may override only worker.image,"
        " budget.doneBy",
        "spec.budget.money: ClusterBambooRuntime spot says it, of which jobs may override only worker.image,"
        " budget.doneBy",
    ]
    assert told(job(queue={"name": "mine"}), runtime(SPOT, overridable=[])) == [
        "spec.queue: ClusterBambooRuntime spot says it, of which jobs may override nothing"
    ]


def test_rules_between_fields_are_judged_with_the_runtime_and_told_with_where_the_value_is_from() -> None:
    unpriced = {**SPOT, "nodePools": [{"name": "spot"}]}
    assert parse_manifest(job(budget={"money": "5"})).budget is not None, "the runtime may have prices"
    assert told(job(), runtime(unpriced)) == [
        "spec.budget: expected only doneBy without a pricePerHour in each of spec.nodePools"
    ]
    assert told(job(), runtime({"elastic": {"minPipelines": 30, "maxWorkers": 99}})) == [
        "spec.elastic.minPipelines: expected at most the number of microbatches in a step (8), got 30"
        " (of ClusterBambooRuntime spot)",
        "spec.elastic.minPipelines: expected at most spec.elastic.maxPipelines (8), got 30"
        " (of ClusterBambooRuntime spot)",
    ]
    assert told(job(topology={"stages": 2}), runtime({"elastic": {"maxWorkers": 8}})) == [
        "spec.elastic.maxWorkers: expected only with an objective (of ClusterBambooRuntime spot)"
    ]
    wrong = runtime({"worker": {"resources": {"limits": {"memory": "8Gi"}}}})
    assert told(job(elastic={"maxWorkers": 2}, worker={"resources": {"limits": {"gpu": 1}}}), wrong) == [
        "spec.worker.resources.limits: expected resource names such as nvidia.com/gpu (without a domain there are only"
        ' cpu, memory, ephemeral-storage and hugepages-SIZE), got "gpu", did you mean nvidia.com/gpu?'
        " (of the job together with ClusterBambooRuntime spot)"
    ]


def test_all_that_is_wrong_with_a_runtime_is_told_at_once() -> None:
    with pytest.raises(ManifestError) as caught:
        parse_runtime(
            {
                "apiVersion": "bamboo.dev/v1alpha1",
                "kind": "BambooRuntime",
                "metadata": {"name": "spot"},
                "spec": {
                    "job": {"nodePools": [{"name": "A"}], "standby": {"workers": 1}, "checkpoint": {"storage": {}}},
                    "overridable": ["worker"],
                    "updates": "Never",
                },
            }
        )
    assert [problem.path for problem in caught.value.problems] == [
        "spec.job.nodePools[0].name",
        "spec.job.standby",
        "spec.overridable[0]",
        "spec.updates",
        "spec.job.checkpoint.storage",
    ]


def test_a_change_reaches_a_job_that_has_begun_only_if_the_runtime_says_so_and_never_what_is_fixed() -> None:
    began = runtime(SPOT)
    change = {
        **SPOT,
        "worker": {**SPOT["worker"], "image": "team/trainer:2"},
        "checkpoint": {"storage": {"uri": "s3://elsewhere/x"}},
        "queue": {"name": "other"},
    }
    assert followed(began, runtime(change, 2), trains=True) is began
    assert followed(began, None, trains=True) is began
    newer = runtime(change, 2, updates="Rollout")
    trains, waits = (followed(began, newer, trains=at) for at in (True, False))
    assert (trains.generation, trains.spec.job["worker"]["image"]) == (2, "team/trainer:2")
    assert trains.spec.job == {**change, "checkpoint": SPOT["checkpoint"], "queue": {"name": "team"}}
    assert waits.spec.job == {**change, "checkpoint": SPOT["checkpoint"]}
    assert parse_runtime(trains.document()) == trains


def test_a_status_says_what_the_runtime_says_but_for_the_pods() -> None:
    document = job()
    pools = [{**POOLS[0], "template": {"spec": {"hostNetwork": True}}}]
    said = written_runtime(runtime({**SPOT, "nodePools": pools}, 3), document)
    assert (said.kind, said.name, said.generation) == ("ClusterBambooRuntime", "spot", 3)
    assert said.job["worker"].keys() == {"image", "resources"}
    assert said.job["nodePools"] == POOLS
    shown = view_of({**document, "status": {"runtime": {"name": "spot", "job": said.job}}})
    assert shown.checkpoint_place == "s3://bucket/jobs/team/story"
    assert [pool.name for pool in shown.spec.node_pools] == ["spot"]
    assert with_written_runtime(document, BambooJobStatus()) is document
    strange = read_status({"runtime": {"job": {"worker": 3, "checkpoint": 4}}})
    assert (
        view_of({**document, "status": {"runtime": {"job": strange.runtime and strange.runtime.job}}}).name == "story"
    )


def test_a_job_without_a_runtime_is_as_it_was() -> None:
    assert parse_manifest(minimal()).runtime_ref is None
