"""The objects that the chart renders, compared with the rest of the repository."""

import json
import re
from pathlib import Path

import pytest
import typer
import yaml

import bamboo_operator.__main__ as operator_main
from bamboo_core import names
from bamboo_operator.signals.node_marks import read_marks
from chart_kit import DIGEST, FOREIGN, SETS, container, worker
from helm_kit import CHART, ROOT, Helm, Json, mistakes, one

pytest_plugins = ["chart_kit"]

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
LINKED = CHART / "linked"


def test_the_chart_links_to_the_files_of_the_repository() -> None:
    """Helm reads only files in the chart's folder, and follows links from it."""
    files = {path.relative_to(LINKED): path for path in LINKED.rglob("*") if not path.is_dir()}
    sources = [ROOT / "operator" / "rbac.yaml", ROOT / "dashboards" / "alerts.yaml"]
    sources += [ROOT / "crds" / "bamboojob.yaml", *(ROOT / "dashboards").glob("*.json")]
    assert all(path.is_symlink() for path in files.values())
    assert {path.resolve() for path in files.values()} == set(sources)
    assert all(path.name == path.resolve().name for path in files.values())


def test_versions_agree() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for part in ("core", "client", "operator", "trainer"):
        assert f'version = "{described["appVersion"]}"' in (ROOT / part / "pyproject.toml").read_text()


@pytest.mark.parametrize("major", ["3", "4"])
def test_helm_has_nothing_against_it(homes: Path, major: str) -> None:
    lint = Helm(homes, major=major)
    for values in SETS.values():
        assert "0 chart(s) failed" in lint.run("lint", "--strict", str(CHART), values=values | {"monitoring": {}})


def test_both_helms_render_the_same(homes: Path, chart: Helm) -> None:
    fixed = {"key": {"existingSecret": "x"}, "tls": {"mode": "Secret", "existingSecret": "x"}}
    for name in ("everything", "nothing"):
        values = SETS[name] | fixed
        assert Helm(homes, major="3").template(values, apis=FOREIGN) == chart.template(values, apis=FOREIGN)


SLOW = [pytest.param(version, marks=pytest.mark.slow) for version in VERSIONS[1:-1]]


@pytest.mark.parametrize("version", [VERSIONS[0], *SLOW, VERSIONS[-1]])
def test_kubernetes_takes_every_object(rendered: dict[str, list[Json]], version: str) -> None:
    for name in SETS if version == VERSIONS[-1] else ("default", "everything"):
        own = [document for document in rendered[name] if document["apiVersion"] not in FOREIGN]
        assert [mistake for document in own for mistake in mistakes(document, version)] == [], name


def test_what_is_installed_by_default(rendered: dict[str, list[Json]]) -> None:
    found = sorted((document["kind"], document["metadata"]["name"]) for document in rendered["default"])
    assert found == [
        ("ClusterRole", "bamboo-operator"),
        ("ClusterRole", "bamboo-operator-jobs-edit"),
        ("ClusterRole", "bamboo-operator-jobs-view"),
        ("ClusterRole", "bamboo-operator-page"),
        ("ClusterRoleBinding", "bamboo-operator"),
        ("ClusterRoleBinding", "bamboo-operator-page"),
        ("CustomResourceDefinition", "bamboojobs.bamboo.dev"),
        ("Deployment", "bamboo-operator"),
        ("NetworkPolicy", "bamboo-operator"),
        ("Role", "bamboo-operator-lease"),
        ("RoleBinding", "bamboo-operator-lease"),
        ("Secret", "bamboo-operator-ca"),
        ("Secret", "bamboo-operator-key"),
        ("Secret", "bamboo-operator-tls"),
        ("Service", "bamboo-operator"),
        ("ServiceAccount", "bamboo-operator"),
        ("ServiceAccount", "bamboo-page"),
    ]
    assert sorted(document["kind"] for document in rendered["nothing"]) == ["Deployment", "Service"]


def test_every_object_is_labelled_and_placed(rendered: dict[str, list[Json]]) -> None:
    cluster_wide = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
    for name, documents in rendered.items():
        for document in documents:
            metadata = document["metadata"]
            assert metadata["labels"]["app.kubernetes.io/instance"] == "bamboo", (name, metadata)
            assert ("namespace" in metadata) == (document["kind"] not in cluster_wide), (name, metadata)


@pytest.mark.parametrize("release", ["b", "my-bamboo", "bamboo-operator", "r" * 53, "bamboo" + "x" * 47])
def test_names_stay_valid_however_long_the_release_is_called(chart: Helm, release: str) -> None:
    documents = chart.template(SETS["everything"], release=release, apis=FOREIGN)
    for document in documents:
        longest = 253 if document["kind"] == "ConfigMap" else 63
        name = document["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name)
        assert len(name) <= longest
    assert "bamboo" in one(documents, "Deployment")["metadata"]["name"]


def test_the_crd_is_the_repositorys_and_kept_unless_the_values_say_otherwise(
    rendered: dict[str, list[Json]], chart: Helm
) -> None:
    crd = yaml.safe_load((ROOT / "crds" / "bamboojob.yaml").read_text())
    found = one(rendered["default"], "CustomResourceDefinition")
    assert found["spec"] == crd["spec"]
    assert (found["apiVersion"], found["metadata"]["name"]) == (crd["apiVersion"], crd["metadata"]["name"])
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    found = one(chart.template({"crds": {"keep": False}}), "CustomResourceDefinition")
    assert "annotations" not in found["metadata"]


# The pod


def test_there_is_one_operator_at_a_time(rendered: dict[str, list[Json]]) -> None:
    spec = one(rendered["default"], "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert "--label-active" not in container(rendered["default"])["args"]
    assert one(rendered["default"], "Service")["spec"]["selector"].keys() == spec["selector"]["matchLabels"].keys()


def test_several_stand_by_on_different_nodes_and_the_service_finds_the_one_that_works(
    rendered: dict[str, list[Json]], chart: Helm
) -> None:
    documents = rendered["two operators"]
    spec = one(documents, "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (2, "RollingUpdate")
    assert "--label-active" in container(documents)["args"]
    assert one(documents, "Service")["spec"]["selector"].items() - spec["selector"]["matchLabels"].items() == {
        (names.LABEL_ACTIVE, "true")
    }
    affinity = spec["template"]["spec"]["affinity"]
    (apart,) = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"] == spec["selector"]["matchLabels"]
    assert "nodeAffinity" in affinity, "still away from spot nodes"
    assert one(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    added = [rule for rule in one(documents, "Role", "bamboo-operator-lease")["rules"] if "patch" in rule["verbs"]]
    assert added == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    own = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
    given = one(chart.template({"replicas": 3, "affinity": own}), "Deployment")["spec"]["template"]["spec"]["affinity"]
    assert given["podAntiAffinity"] == own["podAntiAffinity"]


def test_the_operator_knows_its_arguments(rendered: dict[str, list[Json]]) -> None:
    application = typer.Typer()
    application.command()(operator_main.command)
    known = {option for p in typer.main.get_command(application).params for option in [*p.opts, *p.secondary_opts]}
    for documents in rendered.values():
        found = container(documents)
        assert found["command"] == ["python", "-m", "bamboo_operator"]
        assert {argument.partition("=")[0] for argument in found["args"]} <= known


def test_the_operators_flags_follow_the_values(rendered: dict[str, list[Json]]) -> None:
    assert container(rendered["default"])["args"] == [
        f"--listen=0.0.0.0:{names.WORKERS_PORT}",
        f"--web-listen=0.0.0.0:{names.WEB_PORT}",
        f"--url=wss://bamboo-operator.bamboo-system.svc:{names.WORKERS_PORT}",
        "--image=bamboo-trainer:0.1.0",
        "--run-as-user=65532",
        "--key-file=/var/run/secrets/bamboo.dev/operator/key",
        "--tls-cert=/var/run/secrets/bamboo.dev/tls/tls.crt",
        "--tls-key=/var/run/secrets/bamboo.dev/tls/tls.key",
        "--tls-ca=/var/run/secrets/bamboo.dev/tls/ca.crt",
        "--disruption-budgets",
        "--network-policy",
        "--lease=bamboo-system/bamboo-operator",
        "--identity=$(POD_NAME)",
    ]
    everything = container(rendered["everything"])["args"]
    assert {"--namespace=team-a", "--namespace=team-b", "--verbose"} <= set(everything)
    assert everything[-1] == SETS["everything"]["extraArgs"][0]
    plain = container(rendered["off without quotes"])["args"]
    assert f"--url=ws://bamboo-operator.bamboo-system.svc:{names.WORKERS_PORT}" in plain
    assert not any("--tls" in argument for argument in plain)
    assert "--no-network-policy" in container(rendered["nothing"])["args"]
    assert "--run-as-user=-1" in container(rendered["OpenShift"])["args"]


def test_the_operator_holds_the_lease_under_its_pods_name(chart: Helm) -> None:
    """The chart passes the pod's name as identity, since the operator's default, the host name, may be the node's."""
    documents = chart.template({"env": [{"name": "A", "value": "b"}]}, release="b")
    found = container(documents)
    assert "--lease=bamboo-system/b-bamboo-operator" in found["args"]
    own = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert found["env"].index(own) < found["env"].index({"name": "A", "value": "b"})
    named = [rule["resourceNames"][0] for rule in one(documents, "Role")["rules"] if "resourceNames" in rule]
    assert named == ["b-bamboo-operator"]


def test_an_operator_that_waits_for_the_lease_is_not_restarted_and_gets_no_workers(
    rendered: dict[str, list[Json]],
) -> None:
    found = container(rendered["default"])
    paths = {probe: found[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}


def test_own_marks_reach_the_operator_as_it_reads_them(
    rendered: dict[str, list[Json]], chart: Helm, tmp_path: Path
) -> None:
    documents = rendered["everything"]
    spec = one(documents, "Deployment")["spec"]["template"]
    option = next(a for a in container(documents)["args"] if a.startswith("--node-marks="))
    (mount,) = (m for m in container(documents)["volumeMounts"] if m["name"] == "node-marks")
    (volume,) = (v for v in spec["spec"]["volumes"] if v["name"] == "node-marks")
    data = one(documents, "ConfigMap", volume["configMap"]["name"])["data"]
    file = tmp_path / option.removeprefix(f"--node-marks={mount['mountPath']}/")
    file.write_text(data[file.name])
    assert [(m.mark.source, m.mark.seconds) for m in read_marks(file)] == [
        ("RackMaintenance", 600.0),
        ("PowerOff", None),
    ]
    other = one(chart.template({"nodeMarks": SETS["everything"]["nodeMarks"][:1]}), "Deployment")["spec"]["template"]
    changed = [t["metadata"]["annotations"]["bamboo.dev/node-marks"] for t in (spec, other)]
    assert changed[0] != changed[1], "the operator has to be started again, for it reads them at its start"


def test_images_are_those_of_the_values_by_digest_or_tag(rendered: dict[str, list[Json]]) -> None:
    assert container(rendered["default"])["image"] == "bamboo-operator:0.1.0"
    assert container(rendered["everything"])["image"] == f"registry.example/x/bamboo-operator@{DIGEST}"
    assert "--image=registry.example:5000/bamboo-trainer:2" in container(rendered["everything"])["args"]


def test_all_that_selects_the_pod_finds_it(rendered: dict[str, list[Json]]) -> None:
    for documents in rendered.values():
        template = one(documents, "Deployment")["spec"]["template"]
        labels, ports = (
            template["metadata"]["labels"],
            {p["name"]: p["containerPort"] for p in container(documents)["ports"]},
        )
        assert ports == {"workers": names.WORKERS_PORT, "web": names.WEB_PORT}
        for document in documents:
            selector = {
                "Deployment": ("selector", "matchLabels"),
                "PodDisruptionBudget": ("selector", "matchLabels"),
                "NetworkPolicy": ("podSelector", "matchLabels"),
                "Service": ("selector",),
            }.get(document["kind"])
            found = document["spec"] if selector else {}
            for key in selector or ():
                found = found[key]
            assert found.items() <= {**labels, names.LABEL_ACTIVE: "true"}.items(), document["kind"]
        service = one(documents, "Service")["spec"]
        assert {(p["name"], p["port"], p["targetPort"]) for p in service["ports"]} == {
            ("workers", names.WORKERS_PORT, "workers"),
            ("web", names.WEB_PORT, "web"),
        }


def test_monitors_find_what_they_measure(rendered: dict[str, list[Json]]) -> None:
    documents, pod = rendered["everything"], worker()
    service, monitor = one(documents, "Service"), one(documents, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    workers = one(documents, "PodMonitor")["spec"]
    assert workers["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert ports[workers["podMetricsEndpoints"][0]["port"]] == names.METRICS_PORT
    assert workers["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}
    for document in (monitor, one(documents, "PodMonitor")):
        assert document["metadata"]["labels"]["release"] == "prometheus"


def test_rules_and_dashboards_arrive_as_they_are(rendered: dict[str, list[Json]]) -> None:
    """Helm passes rules and dashboards on unchanged, and does not render the braces in them."""
    documents = rendered["everything"]
    rules = [document["spec"] for document in documents if document["kind"] == "PrometheusRule"]
    assert rules == [yaml.safe_load((LINKED / "alerts.yaml").read_text())]
    found: Json = {}
    for document in documents:
        if document["kind"] == "ConfigMap" and "node-marks.json" not in document["data"]:
            assert document["metadata"]["namespace"] == "grafana"
            assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
            found |= {name: json.loads(text) for name, text in document["data"].items()}
    boards = (LINKED / "dashboards").iterdir()
    assert found == {f"bamboo-{path.name}": json.loads(path.read_text()) for path in boards}
