"""Findings of `bamboo doctor`: CRD, operator, the caller's rights, quotas, a job's queue, and nodes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from bamboo.remote.checks import Severity, Unreadable, fields_of
from bamboo_core.job.spec import JobSpec
from diagnosis_kit import WELL, found, lease, lines, node, operator_pod, spec, spot_node

QUOTA = {
    "metadata": {"name": "small"},
    "status": {"hard": {"pods": "4", "requests.cpu": "8"}, "used": {"pods": "4", "requests.cpu": "7500m"}},
}
QUEUED = spec(queue={"name": "q"})
STOPPED = {"status": {"conditions": [{"type": "Active", "status": "False", "message": "ClusterQueue is stopped"}]}}
TAINT = {"key": "team", "value": "x", "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
GPU_JOB = spec(worker={"resources": {"limits": {"nvidia.com/gpu": 1}}})
TOLERANT = spec(worker={"template": {"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}}})
SELECTING = spec(worker={"template": {"spec": {"nodeSelector": {"type": "a"}}}})
NONE_FITS = ["warning pool spot: no node that is ready now fits a worker"]
DENIED = Unreadable("permission denied: nodes is forbidden")


def crd(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the CRD after `change` has edited the schemas of the BambooJob's spec fields."""
    changed = copy.deepcopy(dict(WELL.crd or {}))  # type: ignore[arg-type]
    change(changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])
    return changed


def test_nothing_is_said_against_a_cluster_on_which_all_is_well() -> None:
    findings = found()
    assert {one.severity for one in findings} == {Severity.OK}
    assert {one.subject for one in findings} == {"CRD", "operator", "your rights", "nodes", "pool spot"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"crd": None}, "problem CRD: the cluster has no bamboojobs.bamboo.dev"),
        (
            {"crd": crd(lambda spec: spec["topology"]["properties"].pop("stages"))},
            "problem CRD: it is older than this bamboo and would drop spec.topology.stages",
        ),
        (
            {"crd": crd(lambda spec: spec.update(later={"type": "string"}))},
            "warning CRD: it is newer than this bamboo, which does not know spec.later",
        ),
        ({"operators": []}, "problem operator: no bamboo-operator was found"),
        (
            {"operators": [operator_pod(phase="Pending")]},
            "problem operator: bamboo-system/bamboo-operator-1 is Pending",
        ),
        (
            {"operators": [operator_pod(ready=False)]},
            "problem operator: bamboo-system/bamboo-operator-1 runs and is not ready",
        ),
        (
            {"operators": [operator_pod("--namespace=other")]},
            "problem operator: bamboo-system/bamboo-operator-1 watches other, and not team",
        ),
        (
            {"lease": lease("2026-05-04T11:50:00.000000Z")},
            "problem operator: nobody has renewed its Lease for 600 s, so no operator works",
        ),
        ({"quotas": [QUOTA]}, "problem quota small: it is used up: pods"),
        ({"spec": QUEUED}, "problem queue q: team has no such LocalQueue of kueue.x-k8s.io/v1beta2"),
        ({"spec": QUEUED, "queue": Unreadable("denied")}, "unknown queue q: denied"),
        ({"spec": QUEUED, "queue": STOPPED}, "problem queue q: it is not active: ClusterQueue is stopped"),
    ],
)
def test_each_fault_is_one_line(changes: dict[str, Any], said: str) -> None:
    assert lines(found(**changes)) == [said]


@pytest.mark.parametrize("part", ["crd", "operators", "lease", "rights", "quotas", "nodes"])
def test_what_may_not_be_read_is_unknown_and_no_problem(part: str) -> None:
    findings = found(**{part: DENIED})
    assert Severity.PROBLEM not in {one.severity for one in findings}
    assert any(one.severity is Severity.UNKNOWN and DENIED.why in one.message for one in findings)


def test_a_caller_is_told_which_rights_submit_lacks() -> None:
    assert lines(found(rights={"get": True, "create": False, "patch": False})) == [
        "warning your rights: in team you may not create bamboojobs.bamboo.dev, patch bamboojobs.bamboo.dev, which"
        " submit needs"
    ]


def test_every_field_of_a_manifest_is_compared_with_the_crd() -> None:
    fields = set(fields_of(JobSpec))
    assert {"spec.task.config", "spec.nodePools.name", "spec.checkpoint.storage"} <= fields
    assert not lines(found()), "the CRD of this version has them all"


def test_a_queue_that_is_there_is_well() -> None:
    assert not lines(found(spec=QUEUED, queue={}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": [spot_node("a", ready=False)]}, ["problem nodes: none of 1 node is ready"]),
        ({"nodes": [node("a")]}, NONE_FITS),
        ({"nodes": [spot_node("a")], "spec": SELECTING}, NONE_FITS),
        ({"nodes": [spot_node("a", TAINT)]}, NONE_FITS),
        ({"nodes": [spot_node("a", TAINT)], "spec": TOLERANT}, []),
        ({"nodes": [spot_node("a", allocatable={"cpu": "3900m"})]}, NONE_FITS),
        ({"nodes": [node("a"), spot_node("b")]}, []),
        ({"nodes": [spot_node("a")], "spec": GPU_JOB}, NONE_FITS),
        ({"nodes": [spot_node("a", GPU_TAINT, allocatable={"nvidia.com/gpu": "1"})], "spec": GPU_JOB}, []),
    ],
)
def test_a_worker_is_compared_with_the_nodes(changes: dict[str, Any], said: list[str]) -> None:
    assert lines(found(**changes)) == said
