"""Security of the chart: rights, the pod's restrictions, the network, keys and certificates."""

import base64
import contextlib
import json
import re
from ipaddress import ip_address

import pytest
import yaml
from cryptography.x509 import DNSName, IPAddress, load_pem_x509_certificate
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from bamboo_core import names
from chart_kit import container, rules_of, worker
from helm_kit import ROOT, Helm, Json, one

pytest_plugins = ["chart_kit"]

RBAC: list[Json] = list(yaml.safe_load_all((ROOT / "operator" / "rbac.yaml").read_text()))
NOT_IN_A_NAMESPACE = {
    *("nodes", "namespaces", "tokenreviews", "subjectaccessreviews", "customresourcedefinitions"),
}


def test_rights_are_those_that_the_tests_run_under(rendered: dict[str, list[Json]]) -> None:
    assert one(rendered["default"], "ClusterRole", "bamboo-operator")["rules"] == rules_of(RBAC, "ClusterRole")
    binding = one(rendered["default"], "ClusterRoleBinding", "bamboo-operator")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "bamboo-operator", "namespace": "bamboo-system"}]
    assert binding["roleRef"]["name"] == "bamboo-operator"


def test_in_its_own_namespace_the_operator_may_hold_one_lease(rendered: dict[str, list[Json]]) -> None:
    for name, account in (("default", "bamboo-operator"), ("everything", "other")):
        role = one(rendered[name], "Role", "bamboo-operator-lease")
        assert role["rules"] == rules_of(RBAC, "Role")
        assert role["metadata"]["namespace"] == "bamboo-system"
        binding = one(rendered[name], "RoleBinding", "bamboo-operator-lease")
        assert binding["metadata"]["namespace"] == "bamboo-system"
        assert binding["roleRef"]["name"] == "bamboo-operator-lease"
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "bamboo-system"}]


def test_in_watched_namespaces_the_operator_has_no_more_than_it_needs(rendered: dict[str, list[Json]]) -> None:
    documents = rendered["everything"]
    everywhere = one(documents, "ClusterRole", "bamboo-operator")["rules"]
    roles = [role for role in documents if role["kind"] == "Role" and role["metadata"]["name"] == "bamboo-operator"]
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    assert roles[0]["rules"] == roles[1]["rules"]
    assert sorted(map(str, everywhere + roles[0]["rules"])) == sorted(map(str, rules_of(RBAC, "ClusterRole")))
    assert {resource for rule in everywhere for resource in rule["resources"]} == NOT_IN_A_NAMESPACE
    bindings = [document for document in documents if document["kind"] == "RoleBinding"]
    for binding in (b for b in bindings if b["metadata"]["name"] == "bamboo-operator"):
        assert binding["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": "bamboo-operator",
        }
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "other", "namespace": "bamboo-system"}]


def test_pages_are_looked_at_by_somebody_who_may_do_nothing_else(rendered: dict[str, list[Json]]) -> None:
    for name, kind, count in (("default", "ClusterRoleBinding", 1), ("everything", "RoleBinding", 2)):
        role = one(rendered[name], "ClusterRole", "bamboo-operator-page")
        assert role["rules"] == [{"apiGroups": ["bamboo.dev"], "resources": ["bamboojobs"], "verbs": ["get", "list"]}]
        found = [b for b in rendered[name] if b["kind"] == kind and b["roleRef"]["name"] == "bamboo-operator-page"]
        assert len(found) == count
        for binding in found:
            account = {"kind": "ServiceAccount", "name": "bamboo-page", "namespace": "bamboo-system"}
            assert binding["subjects"] == [account]


def test_no_right_is_a_wildcard_or_reads_secrets_and_config_maps(rendered: dict[str, list[Json]]) -> None:
    for documents in rendered.values():
        for rule in [*rules_of(documents, "ClusterRole"), *rules_of(documents, "Role")]:
            assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not {"secrets", "configmaps"} & set(rule["resources"])


def test_users_get_their_rights_with_the_clusters_own_roles(rendered: dict[str, list[Json]]) -> None:
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    found = {}
    for role in ("view", "edit"):
        document = one(rendered["default"], "ClusterRole", f"bamboo-operator-jobs-{role}")
        labels = {key.removeprefix(prefix) for key in document["metadata"]["labels"] if key.startswith(prefix)}
        found[role] = labels, {verb for rule in document["rules"] for verb in rule["verbs"]}
    assert found["view"] == ({"view"}, {"get", "list", "watch"})
    assert found["edit"][0] == {"edit", "admin"}
    assert {"create", "patch", "delete"} <= found["edit"][1]


def test_the_pod_is_restricted(rendered: dict[str, list[Json]]) -> None:
    """The operator's pod meets the Pod Security Standard *restricted*, and more."""
    for name, documents in rendered.items():
        pod = one(documents, "Deployment")["spec"]["template"]["spec"]
        own = pod["containers"][0]["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"].get("runAsUser", 1) != 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert {kind for volume in pod["volumes"] for kind in volume} <= {"name", "emptyDir", "secret", "configMap"}
        assert not any("hostPort" in port for port in pod["containers"][0]["ports"])


def test_workers_and_who_is_named_reach_the_operator_and_nobody_else(rendered: dict[str, list[Json]]) -> None:
    pod = worker()
    for name, where, blocks in (("default", {}, []), ("everything", None, ["10.0.0.0/16", "fd00::/64"])):
        spec = one(rendered[name], "NetworkPolicy")["spec"]
        workers, web = spec["ingress"]
        assert workers["ports"] == [{"port": "workers", "protocol": "TCP"}]
        peer, *others = workers["from"]
        assert others == [{"ipBlock": {"cidr": block}} for block in blocks]
        (expression,) = peer["podSelector"]["matchExpressions"]
        assert expression == {"key": names.LABEL_JOB_NAME, "operator": "Exists"}
        assert expression["key"] in pod["metadata"]["labels"]
        assert peer["namespaceSelector"] == where if where is not None else "team-b" in str(peer["namespaceSelector"])
        assert web["ports"] == [{"port": "web", "protocol": "TCP"}]
        assert spec["policyTypes"] == (["Ingress", "Egress"] if "egress" in spec else ["Ingress"])


# Secrets


def test_secrets_are_in_secrets_only(rendered: dict[str, list[Json]]) -> None:
    documents = rendered["everything"]
    private = [
        value
        for document in documents
        if document["kind"] == "Secret"
        for name, value in document["data"].items()
        if name in ("key", "tls.key")
    ]
    assert len(private) == 3
    shown = json.dumps([document for document in documents if document["kind"] != "Secret"])
    for value in private:
        plain = base64.b64decode(value)
        assert value not in shown
        assert plain.hex() not in shown
        assert plain.decode("latin-1")[:40] not in shown


def test_the_key_is_long_and_another_one_each_time(chart: Helm, rendered: dict[str, list[Json]]) -> None:
    both = [one(documents, "Secret", "bamboo-operator-key") for documents in (rendered["default"], chart.template())]
    found = [base64.b64decode(document["data"]["key"]) for document in both]
    assert found[0] != found[1]
    assert [len(key) for key in found] == [32, 32]


def test_what_running_jobs_need_outlives_the_release(rendered: dict[str, list[Json]]) -> None:
    """Uninstalling may remove the certificate: the next installation makes another one with the kept authority."""
    secrets = {
        document["metadata"]["name"]: document["metadata"]
        for document in rendered["default"]
        if document["kind"] == "Secret"
    }
    kept = [
        name
        for name, metadata in secrets.items()
        if metadata.get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    ]
    assert sorted(kept) == ["bamboo-operator-ca", "bamboo-operator-key"]
    assert len(secrets) == 3


NAMES = ["bamboo-operator", "bamboo-operator.bamboo-system", "bamboo-operator.bamboo-system.svc"]


@pytest.mark.parametrize(
    ("name", "good"),
    [
        *((name, True) for name in NAMES),
        ("bamboo.example", True),
        ("10.0.0.1", True),
        ("fd00::1", True),
        ("elsewhere.bamboo-system.svc", False),
        ("10.0.0.2", False),
    ],
)
def test_workers_trust_the_certificate_under_its_names_only(
    rendered: dict[str, list[Json]], name: str, good: bool
) -> None:
    data = one(rendered["everything"], "Secret", "bamboo-operator-tls")["data"]
    authority, certificate = (load_pem_x509_certificate(base64.b64decode(data[file])) for file in ("ca.crt", "tls.crt"))
    subject = IPAddress(ip_address(name)) if re.fullmatch(r"[0-9.]+|.*:.*", name) else DNSName(name)
    verifier = PolicyBuilder().store(Store([authority])).build_server_verifier(subject)
    with contextlib.nullcontext() if good else pytest.raises(VerificationError):
        verifier.verify(certificate, [])


def test_the_certificates_authority_is_no_ones_but_helms(rendered: dict[str, list[Json]]) -> None:
    """The operator's pod does not get the authority's key."""
    pod = one(rendered["default"], "Deployment")["spec"]["template"]["spec"]
    mounted = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert mounted == ["bamboo-operator-key", "bamboo-operator-tls"]
    assert not any("tls.key" in str(entry) for entry in container(rendered["default"])["env"])


def test_cert_manager_makes_the_certificate(rendered: dict[str, list[Json]]) -> None:
    documents = rendered["cert-manager"]
    made = one(documents, "Certificate", "bamboo-operator-tls")["spec"]
    assert made["issuerRef"] == {"name": "bamboo-operator-ca", "kind": "Issuer"}
    assert one(documents, "Issuer", "bamboo-operator-ca")["spec"]["ca"]["secretName"] == "bamboo-operator-ca"
    assert set(NAMES) <= set(made["dnsNames"])
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    assert made["secretName"] in [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    own = one(rendered["own issuer"], "Certificate")["spec"]
    assert own["issuerRef"] == {"name": "x", "kind": "ClusterIssuer"}
    assert not [document for document in rendered["own issuer"] if document["kind"] == "Issuer"]
