"""What a diagnosis says of the CRD, the operator and the caller's rights."""

import copy
from typing import Any

import pytest

from bamboo.remote.diagnosis.facts import Unreadable
from bamboo.remote.diagnosis.findings import Severity
from bamboo.remote.diagnosis.installation_checks import fields_of
from bamboo_core.job.spec import JobSpec
from diagnosis_kit import WELL, found, lease, lines, operator_pod

DENIED = Unreadable("permission denied: nodes is forbidden")


def crd_without(field: str) -> dict[str, Any]:
    changed = copy.deepcopy(dict(WELL.crd or {}))  # type: ignore[arg-type]
    properties = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del properties["topology"]["properties"][field]
    return changed


def crd_with(field: str) -> dict[str, Any]:
    changed = copy.deepcopy(dict(WELL.crd or {}))  # type: ignore[arg-type]
    schema = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"][field] = {"type": "string"}
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
            {"crd": crd_without("stages")},
            "problem CRD: it is older than this bamboo and would drop spec.topology.stages",
        ),
        ({"crd": crd_with("later")}, "warning CRD: it is newer than this bamboo, which does not know spec.later"),
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
    ],
)
def test_each_fault_is_one_line(changes: dict[str, Any], said: str) -> None:
    assert said in lines(found(**changes))


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
