"""The CRDs of runtimes: made of the job's types, taken by every Kubernetes, and of one mind with the parser."""

from copy import deepcopy
from typing import Any

import kubernetes_validate
import pytest

from bamboo_core import names
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.runtime import parse_runtime
from bamboo_core.job.spec import RuntimeKind
from bamboo_core.job.yaml_file import load_document
from bamboo_core.kube.request_parts import runtime_plural
from crd_cases import Edit, edits, whole
from crd_kit import ROOT, Served

CRDS = {kind: load_document(str(ROOT / "crds" / f"{runtime_plural(kind)[:-1]}.yaml")) for kind in RuntimeKind}
SERVED = {kind: Served(crd) for kind, crd in CRDS.items()}
CLUSTER = SERVED[RuntimeKind.CLUSTER]
SPEC: dict[str, Any] = CLUSTER.schema["properties"]["spec"]


def full() -> dict[str, Any]:
    """A runtime that says all that it may."""
    said = whole()["spec"]
    job = {name: deepcopy(said[name]) for name in SPEC["properties"]["job"]["properties"] if name in said}
    job["elastic"] = {"minPipelines": 1, "maxPipelines": 4, "objective": "Value", "maxStages": 4, "maxWorkers": 8}
    job["worker"] = {name: job["worker"][name] for name in ("image", "resources", "template")}
    job["failurePolicy"] = {"rules": job["failurePolicy"]["rules"]}
    job["budget"] = {"money": "100", "moneyPerHour": "9", "doneBy": "2026-12-24T18:00:00Z"}
    spec = {"job": job, "overridable": ["worker.image", "budget.doneBy"], "updates": "Rollout"}
    metadata = {"name": "spot"}
    return {"apiVersion": names.API_VERSION, "kind": str(RuntimeKind.CLUSTER), "metadata": metadata, "spec": spec}


def parsed(document: dict[str, Any]) -> object:
    try:
        return parse_runtime(document)
    except ManifestError:
        return None


@pytest.mark.parametrize("kind", RuntimeKind)
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_takes_them(kind: RuntimeKind, version: str) -> None:
    assert kubernetes_validate.validate(CRDS[kind], version, strict=True) == version
    spec = CRDS[kind]["spec"]
    assert CRDS[kind]["metadata"]["name"] == f"{spec['names']['plural']}.{names.GROUP}"
    assert (spec["names"]["kind"], spec["names"]["plural"]) == (kind, runtime_plural(kind))
    assert (spec["scope"] == "Cluster") == (kind is RuntimeKind.CLUSTER)


def test_both_kinds_are_the_same_but_for_their_names() -> None:
    one, other = (crd["spec"]["versions"] for crd in CRDS.values())
    assert one == other


def test_every_field_of_a_whole_runtime_is_taken_by_both_and_stored_as_it_was_said() -> None:
    document = full()
    assert CLUSTER.refusals(document) == []
    assert parse_runtime(CLUSTER.defaulted(document)) == parse_runtime(CLUSTER.defaulted(CLUSTER.defaulted(document)))
    bare = {**document, "spec": {}}
    assert CLUSTER.defaulted(bare)["spec"] == {"updates": "NewJobs"}
    assert parse_runtime(CLUSTER.defaulted(bare)) == parse_runtime(bare)
    assert set(document["spec"]["job"]) == set(SPEC["properties"]["job"]["properties"])


@pytest.mark.parametrize("field", SPEC["properties"])
def test_both_judge_every_change_of_a_field_alike(field: str) -> None:
    document = full()
    all_edits = list(edits(SPEC["properties"][field], document["spec"][field], ("spec", field)))
    assert len(all_edits) > 3
    assert [str(edit) for edit in all_edits if not _agree(document, edit)] == []


def _agree(document: dict[str, Any], edit: Edit) -> bool:
    edited = edit.of(document)
    server, parser = CLUSTER.refusals(edited), parsed(edited)
    return bool(server) == (parser is None) and not (edit.refused and parser)
