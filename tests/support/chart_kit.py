"""Kit for tests of the Helm chart: values, fixtures that render the chart, and look-ups in the rendered objects."""

from pathlib import Path

import pytest

from bamboo_core.job.manifest import parse_manifest
from bamboo_operator.manifests.worker_pod import WorkerPodSettings, worker_pod
from helm_kit import PACKAGES, Helm, Json, Missing, helm, one
from manifest_kit import minimal

PROMETHEUS, CERT_MANAGER = "monitoring.coreos.com/v1", "cert-manager.io/v1"
FOREIGN = (PROMETHEUS, CERT_MANAGER)  # API versions that Kubernetes itself does not have
DIGEST = "sha256:" + "0123456789abcdef" * 4

SETS: dict[str, Json] = {
    "default": {},
    "everything": {
        "watchNamespaces": ["team-a", "team-b"],
        "image": {"repository": "registry.example/x/bamboo-operator", "digest": DIGEST, "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "workers": {
            "image": {"repository": "registry.example:5000/bamboo-trainer", "tag": "2"},
        },
        "tls": {"dnsNames": ["bamboo.example"], "ipAddresses": ["10.0.0.1", "fd00::1"]},
        "nodeMarks": [
            {"reason": "RackMaintenance", "taint": {"key": "rack.example/maintenance"}, "noticeSeconds": 600},
            {"reason": "PowerOff", "condition": {"type": "PowerOff", "status": "True"}, "gone": True},
        ],
        "verbose": True,
        "extraArgs": ["--verbose"],
        "env": [{"name": "A", "value": "b"}],
        "serviceAccount": {"name": "other", "annotations": {"a": "b"}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "podAnnotations": {"note": "x"},
        "podLabels": {"team": "a", "app.kubernetes.io/name": "not-this"},
        "service": {"annotations": {"a": "b"}},
        "networkPolicy": {"egress": [{"ports": [{"port": 443}]}], "workersFrom": ["10.0.0.0/16", "fd00::/64"]},
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Bamboo"}, "namespace": "grafana"},
    },
    "nothing": {
        "crds": {"install": False},
        "key": {"existingSecret": "mine"},
        "tls": {"mode": "Off"},
        "serviceAccount": {"create": False},
        "rbac": {"create": False, "userRoles": False, "pageAccount": False},
        "nodeSelector": {"kubernetes.io/os": None},
        "tolerations": [],
        "affinity": None,
        "networkPolicy": {"enabled": False, "workers": False},
        "workers": {"disruptionBudgets": False},
    },
    "two operators": {"replicas": 2},
    "cert-manager": {"tls": {"mode": "CertManager", "ipAddresses": ["10.0.0.1"]}},
    "own issuer": {
        "tls": {"mode": "CertManager", "certManager": {"issuerRef": {"name": "x", "kind": "ClusterIssuer"}}}
    },
    "own certificate": {"tls": {"mode": "Secret", "existingSecret": "own"}},
    "off without quotes": {"tls": {"mode": False}},
    "OpenShift": {
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "workers": {"runAsUser": -1},
    },
}


def container(objects: list[Json]) -> Json:
    found: Json = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return found


def rules_of(documents: list[Json], kind: str) -> list[Json]:
    return [rule for document in documents if document["kind"] == kind for rule in document["rules"]]


def worker() -> Json:
    settings = WorkerPodSettings(coordinator_url="ws://x:1", image="x")
    pod: Json = worker_pod(parse_manifest(minimal()), "u", 0, None, settings)
    return pod


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        for major in PACKAGES:
            helm(major)
    except Missing as missing:
        pytest.skip(str(missing))
    return tmp_path_factory.mktemp("helm")


@pytest.fixture(scope="session")
def chart(homes: Path) -> Helm:
    return Helm(homes)


@pytest.fixture(scope="session")
def rendered(chart: Helm) -> dict[str, list[Json]]:
    """Render the chart with each set of values in SETS, and return the objects by the set's name."""
    return {name: chart.template(values, apis=FOREIGN) for name, values in SETS.items()}
