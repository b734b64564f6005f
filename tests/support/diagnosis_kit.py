"""Facts about a faultless cluster for tests of `diagnosis`, and builders of objects to replace these facts."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from bamboo.remote.checks import ClusterFacts, Finding, Severity
from bamboo.remote.doctor import SUBMITTING, diagnosis
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from manifest_kit import bamboojob, training

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


def node(name: str, *taints: Json, ready: bool = True, allocatable: Json | None = None) -> Json:
    """Return a Node object without labels, so that the node pool of `spec()` does not select it."""
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": {"taints": list(taints)},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "allocatable": {"cpu": "8", "memory": "32Gi", **(allocatable or {})},
        },
    }


def spot_node(name: str, *taints: Json, **more: Any) -> Json:
    """Return a Node object with Karpenter's label of spot nodes."""
    made = node(name, *taints, **more)
    made["metadata"]["labels"]["karpenter.sh/capacity-type"] = "spot"
    return made


def spec(**parts: Any) -> JobSpec:
    """Return a job, by default of four workers on Karpenter's spot nodes. parts: sections to replace."""
    usual = {
        "task": {"entrypoint": "bamboo_trainer.models.mlp:build"},
        "training": training(1000, 64, 8),
        "topology": {"stages": 4},
        "nodePools": [{"name": "spot", "preset": "Karpenter"}],
        "worker": {"resources": {"requests": {"cpu": 4, "memory": "8Gi"}}},
    }
    return parse_manifest(bamboojob("story", namespace="team", **(usual | parts)))


WELL = ClusterFacts(
    namespace="team",
    crd=yaml.safe_load(CRD.read_text()),
    operators=[operator_pod("--lease=bamboo-system/bamboo-operator", "--namespace=team")],
    lease=lease(),
    rights=dict.fromkeys(SUBMITTING, True),
    quotas=[],
    nodes=[spot_node(f"node-{number}") for number in range(4)],
    spec=spec(),
)


def found(**changes: Any) -> tuple[Finding, ...]:
    """Return the findings for a faultless cluster with changed facts. changes: fields of `ClusterFacts`."""
    return diagnosis(replace(WELL, **changes), NOW)


def lines(findings: tuple[Finding, ...]) -> list[str]:
    """Return severity, subject and message of all findings that are not OK."""
    return [f"{one.severity} {one.subject}: {one.message}" for one in findings if one.severity is not Severity.OK]
