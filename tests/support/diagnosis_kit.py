"""A cluster on which nothing is wrong, as a diagnosis reads it, and what tests change of it."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from bamboo.remote.diagnosis.facts import ClusterFacts
from bamboo.remote.diagnosis.findings import Finding, Severity
from bamboo.remote.diagnosis.rights import OPERATOR, PERSON
from bamboo.remote.doctor import diagnosis
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
CRD = Path(__file__).parents[2] / "crds" / "bamboojob.yaml"
Json = dict[str, Any]


def operator_pod(*args: str, ready: bool = True, phase: str = "Running") -> Json:
    return {
        "metadata": {"name": "bamboo-operator-1", "namespace": "bamboo-system", "labels": {}},
        "spec": {
            "serviceAccountName": "bamboo-operator",
            "containers": [{"name": "operator", "command": ["python", "-m", "bamboo_operator"], "args": list(args)}],
        },
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def lease(renewed: str = "2026-05-04T11:59:55.000000Z") -> Json:
    return {"metadata": {"name": "bamboo-operator"}, "spec": {"holderIdentity": "one", "renewTime": renewed}}


def endpoints(*, ready: bool = True) -> Json:
    return {"endpoints": [{"conditions": {"ready": ready}, "targetRef": {"name": "bamboo-operator-1"}}]}


def node(
    name: str,
    *taints: Json,
    ready: bool = True,
    allocatable: Json | None = None,
    provider: str = "kind://",
) -> Json:
    """A node of no pool. provider: the beginning of its providerID."""
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": {"taints": list(taints), "providerID": provider},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "allocatable": {"cpu": "8", "memory": "32Gi", **(allocatable or {})},
        },
    }


def spot_node(name: str, *taints: Json, **more: Any) -> Json:
    """One of Karpenter's."""
    made = node(name, *taints, **more)
    made["metadata"]["labels"] |= {"karpenter.sh/capacity-type": "spot", "topology.kubernetes.io/zone": "a"}
    return made


def spec(**parts: Any) -> JobSpec:
    """Four workers on spot nodes of Karpenter's, with prices and a claim for checkpoints."""
    usual = {
        "task": {"entrypoint": "bamboo_trainer.models.mlp:build"},
        "training": {"steps": 1000, "globalBatchSize": 64, "microBatchSize": 8},
        "topology": {"stages": 4},
        "nodePools": [{"name": "spot", "preset": "Karpenter", "pricePerHour": "0.45"}],
        "checkpoint": {"storage": {"persistentVolumeClaim": {"claimName": "states"}}},
        "worker": {"resources": {"requests": {"cpu": 4, "memory": "8Gi"}}},
    }
    document = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "story", "namespace": "team"},
        "spec": {name: part for name, part in (usual | parts).items() if part is not None},
    }
    return parse_manifest(document)


def claim(phase: str = "Bound", *modes: str) -> Json:
    return {"spec": {"accessModes": list(modes or ("ReadWriteMany",))}, "status": {"phase": phase}}


WELL = ClusterFacts(
    namespace="team",
    minor=36,
    namespace_object={"metadata": {"name": "team"}},
    crd=yaml.safe_load(CRD.read_text()),
    operators=[operator_pod("--lease=bamboo-system/bamboo-operator", "--namespace=team")],
    lease=lease(),
    slices=[endpoints()],
    person={right: True for needed in PERSON.values() for right in needed},
    operator=dict.fromkeys(OPERATOR, True),
    quotas=[],
    nodes=[spot_node(f"node-{number}") for number in range(4)],
    spec=spec(),
    claim=claim(),
)


def found(**changes: Any) -> tuple[Finding, ...]:
    """What is said of a cluster on which all is well but for these facts."""
    return diagnosis(replace(WELL, **changes), NOW)


def lines(findings: tuple[Finding, ...]) -> list[str]:
    """What asks for a look: severity, subject and message, without what is well."""
    return [f"{one.severity} {one.subject}: {one.message}" for one in findings if one.severity is not Severity.OK]
