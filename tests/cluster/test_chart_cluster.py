"""The chart and its operator on a real API server: a real Helm installs, upgrades, rolls back and uninstalls them."""

import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from chart_release import CRD, Install, Release, no_crd
from cluster.client import Json
from cluster.handle import Cluster
from helm_kit import CHART, ROOT, HelmError, Missing, helm
from operator_jobs import small
from operator_process import Job
from waiting import until

pytest_plugins = ["cluster_kit"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}  # for the operator's pod and for workers


@pytest.fixture
def release(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Install]:
    """Yield a function that makes a release with a new name, not installed yet. The cluster has no CRD at first."""
    if cluster.folder is None:
        pytest.skip("these tests delete the CRD: they are for the test cluster only")
    try:
        helm()
    except Missing as missing:
        pytest.skip(str(missing))
    made: list[Release] = []

    def make(major: str = "4", where: str = namespace, chart: Path = CHART) -> Release:
        folder = tmp_path / f"release-{len(made)}"
        folder.mkdir()
        made.append(Release(cluster, where, folder, f"bamboo-{secrets.token_hex(3)}", major, chart=chart))
        return made[-1]

    with no_crd(cluster.api):
        try:
            yield make
        finally:
            for one in made:
                try:
                    print(one.said())
                    one.uninstall()
                except (HelmError, ValueError):
                    pass  # it is not installed (any more)


def arguments(release: Release) -> list[str]:
    found: list[str] = release.pod()["spec"]["containers"][0]["args"]
    return found


@pytest.mark.slow
def test_the_life_of_a_release(release: Install, cluster: Cluster, namespace: str) -> None:
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": RESTRICTED}})
    bamboo = release()
    said = bamboo.install()
    assert "kubectl get bamboojobs --watch" in said
    pod = bamboo.pod()
    assert pod["spec"]["nodeName"] == "on-demand-a", "it runs on a spot node"
    key, authority, certificate = bamboo.secret("key"), bamboo.secret("ca"), bamboo.secret("tls")
    assert len(key["key"]) == 32

    job = Job(cluster.api, namespace, small("trains-on"))
    job.step(5)

    # an upgrade: another operator, nothing else is new; the job trains on
    bamboo.upgrade(verbose=True)
    assert bamboo.pod()["metadata"]["uid"] != pod["metadata"]["uid"]
    assert "--verbose" in arguments(bamboo)
    assert (bamboo.secret("key"), bamboo.secret("ca"), bamboo.secret("tls")) == (key, authority, certificate)
    step = job.status()["training"]["step"]
    job.step(step + 5)
    assert job.status()["preemptions"] == 0

    # other names: another certificate, of the same authority
    names = {"tls": {"dnsNames": ["bamboo.example"]}}
    bamboo.upgrade(verbose=True, **names)
    assert (bamboo.secret("key"), bamboo.secret("ca")) == (key, authority)
    assert bamboo.secret("tls")["tls.crt"] != certificate["tls.crt"]
    assert bamboo.secret("tls")["ca.crt"] == certificate["ca.crt"]

    bamboo.rollback(1)
    assert "--verbose" not in arguments(bamboo)
    assert (bamboo.secret("key"), bamboo.secret("tls")) == (key, certificate)
    step = job.status()["training"]["step"]
    job.step(step + 5)
    assert job.status()["preemptions"] == 0
    assert "Traceback" not in bamboo.said()

    # it goes, and leaves jobs alone
    assert "kept due to the resource policy" in bamboo.uninstall()
    bamboo.until_gone(allowed=lambda name: name.endswith(".bamboo.dev"))
    assert any("bamboojobs.bamboo.dev" in name for name in bamboo.leftovers())
    assert (bamboo.secret("key"), bamboo.secret("ca")) == (key, authority)
    assert {pod["status"]["phase"] for pod in job.pods().values()} == {"Running"}

    # and comes back: key and authority are those that the job's workers know
    bamboo.install()
    assert (bamboo.secret("key"), bamboo.secret("ca")) == (key, authority)
    assert bamboo.secret("tls")["ca.crt"] == certificate["ca.crt"]
    step = job.status()["training"]["step"]
    job.step(step + 5)
    assert job.status()["preemptions"] == 0
    job.delete()
    job.until_gone()


def test_an_operator_of_one_namespace_has_rights_there_alone_and_so_have_users(
    release: Install, cluster: Cluster, namespace: str
) -> None:
    """An operator makes pods in one namespace only. Upgrading renews certificate and CRD; uninstalling deletes both."""
    other = f"{namespace}-other"
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}})
    try:
        # Helm 4 applies on the server, which keeps what somebody else has set, as `_renewed` does
        bamboo = release("3", where=other)
        bamboo.values |= {"watchNamespaces": [namespace], "crds": {"keep": False}}
        crd = bamboo.chart / "linked" / "bamboojob.yaml"
        newest = crd.read_text()
        crd.write_text(older_crd(bamboo))
        bamboo.install()
        assert cluster.api.get(CRD)["spec"]["names"]["shortNames"] == ["old"]
        Job(cluster.api, namespace, small("watched", steps=20)).until("Complete")
        unseen = Job(cluster.api, other, small("unseen", steps=20))
        assert unseen.status() == {}
        assert unseen.pods() == {}
        account = f"system:serviceaccount:{other}:{bamboo.full_name}"
        assert may(cluster, account, "create", "pods", namespace)
        assert may(cluster, account, "list", "nodes", None)
        assert not may(cluster, account, "create", "pods", other)
        assert not may(cluster, account, "get", "secrets", other)
        assert "Traceback" not in bamboo.said()
        _users_have_rights(cluster, namespace)
        crd.write_text(newest)
        _renewed(bamboo, cluster)
        assert cluster.api.get(CRD)["spec"]["names"]["shortNames"] == ["bj"]
        bamboo.uninstall()
        bamboo.until_gone()
        cluster.api.wait(CRD, lambda found: not found)
    finally:
        cluster.api.delete(f"/api/v1/namespaces/{other}")


def _renewed(bamboo: Release, cluster: Cluster) -> None:
    """Check that an upgrade renews a certificate that is due, and keeps the authority."""
    authority, certificate = bamboo.secret("ca"), bamboo.secret("tls")
    path = f"/api/v1/namespaces/{bamboo.namespace}/secrets/{bamboo.full_name}-tls"
    due = cluster.api.get(path)["metadata"]["annotations"]["bamboo.dev/renew-after"]
    cluster.api.patch(path, {"metadata": {"annotations": {"bamboo.dev/renew-after": "1000000000"}}})
    bamboo.upgrade()
    assert bamboo.secret("ca") == authority
    assert bamboo.secret("tls")["tls.crt"] != certificate["tls.crt"]
    assert int(cluster.api.get(path)["metadata"]["annotations"]["bamboo.dev/renew-after"]) >= int(due)


def may(cluster: Cluster, user: str, verb: str, resource: str, namespace: str | None, group: str = "") -> bool:
    attributes = {"verb": verb, "resource": resource, "group": group} | ({"namespace": namespace} if namespace else {})
    review = {"spec": {"user": user, "resourceAttributes": attributes}}
    answer = cluster.api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    allowed: bool = answer["status"]["allowed"]
    return allowed


def _users_have_rights(cluster: Cluster, namespace: str) -> None:
    """Check that Kubernetes' own roles `view` and `edit` give their users rights on the jobs of a namespace."""
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
    for role in ("view", "edit"):
        subject = {"kind": "User", "name": f"{role}er", "apiGroup": "rbac.authorization.k8s.io"}
        reference = {"kind": "ClusterRole", "name": role, "apiGroup": "rbac.authorization.k8s.io"}
        binding = {"metadata": {"name": role}, "roleRef": reference, "subjects": [subject]}
        cluster.api.request("POST", rbac, binding)
    expected = [("viewer", "get"), ("editer", "get"), ("editer", "create"), ("editer", "delete")]
    # the cluster's own roles get them one after the other
    until(lambda: rights(cluster, namespace) == expected, 90, lambda: rights(cluster, namespace))
    assert not may(cluster, "viewer", "get", "bamboojobs", "default", "bamboo.dev")


def rights(cluster: Cluster, namespace: str) -> list[tuple[str, str]]:
    return [
        (user, verb)
        for user in ("viewer", "editer")
        for verb in ("get", "create", "delete")
        if may(cluster, user, verb, "bamboojobs", namespace, "bamboo.dev")
    ]


def older_crd(release: Release) -> str:
    """Return the chart's CRD with another short name, as an earlier kubectl may have installed it."""
    document: Json = yaml.safe_load((release.chart / "linked" / "bamboojob.yaml").read_text())
    document["spec"]["names"]["shortNames"] = ["old"]
    return yaml.safe_dump(document, sort_keys=False)


def documented(heading: str) -> list[str]:
    """Return the commands of the first code block below a heading in docs/upgrade.md."""
    page = (ROOT / "docs" / "upgrade.md").read_text()
    return page.partition(heading)[2].partition("```\n")[2].partition("```")[0].strip().splitlines()


class Shell:
    """A runner of commands from a docs page, with the tests' kubectl. A command that fails also fails the test."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        self._env = {"KUBECONFIG": str(cluster.kubeconfig), "PATH": programs, "HOME": str(home)}

    def run(self, command: str) -> None:
        done = subprocess.run(shlex.split(command), env=self._env, capture_output=True, text=True, timeout=120)
        print(f"$ {command}\n{done.stdout}{done.stderr}")
        assert done.returncode == 0, done.stderr


@pytest.fixture
def shell(cluster: Cluster, tmp_path: Path) -> Shell:
    return Shell(cluster, tmp_path)


def made_by_kubectl(release: Release, shell: Shell, folder: Path) -> Job:
    """Create the CRD by kubectl, and a job; check that Helm then refuses to install or upgrade; return the job."""
    file = folder / "bamboojob.yaml"
    file.write_text(older_crd(release))
    shell.run(f"kubectl apply --server-side -f {file}")
    shell.run("kubectl wait --for=condition=Established --timeout=60s crd/bamboojobs.bamboo.dev")
    job = Job(release.api, release.namespace, small("before", steps=20))
    for act in (release.install, release.upgrade_or_install):
        with pytest.raises(HelmError, match="invalid ownership metadata"):
            act()
    return job


def applied(release: Release, job: Job) -> None:
    """Check that the chart's CRD is installed and the earlier job completes."""
    assert release.api.get(CRD)["spec"]["names"]["shortNames"] == ["bj"]
    job.until("Complete")


# Helm 4 applies on the server, except on one that is too old for it (Release); here it has to all the same
@pytest.mark.slow
@pytest.mark.parametrize(("major", "server_side"), [("4", True), ("4", False), ("3", False)])
def test_a_crd_that_kubectl_has_made_is_given_to_a_release(
    release: Install, shell: Shell, tmp_path: Path, major: str, server_side: bool
) -> None:
    """After the commands of docs/upgrade.md a release adopts kubectl's CRD; server-side it needs --force-conflicts."""
    bamboo = release(major)
    job = made_by_kubectl(bamboo, shell, tmp_path)
    commands = documented("**A CRD that kubectl has made**")
    assert [command.split()[:3] for command in commands] == [["kubectl", verb, "crd"] for verb in ("label", "annotate")]
    for command in commands:
        named = command.replace("release-name=bamboo ", f"release-name={bamboo.name} ")
        shell.run(named.replace("release-namespace=bamboo-system", f"release-namespace={bamboo.namespace}"))
    if server_side:
        with pytest.raises(HelmError, match=r'conflicts? with "kubectl"'):
            bamboo.upgrade_or_install("--server-side=true")
        bamboo.upgrade_or_install("--server-side=true", "--force-conflicts")
        bamboo.upgrade_or_install("--server-side=true")  # once is enough
    else:
        bamboo.upgrade_or_install()
    applied(bamboo, job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("major", "flags"),
    [
        ("4", ("--server-side=true", "--force-conflicts")),
        ("4", ()),
        ("3", ()),
    ],
    ids=str,
)
def test_a_release_takes_such_a_crd_by_one_flag_too(
    release: Install, shell: Shell, tmp_path: Path, major: str, flags: tuple[str, ...]
) -> None:
    bamboo = release(major)
    job = made_by_kubectl(bamboo, shell, tmp_path)
    bamboo.upgrade_or_install("--take-ownership", *flags)
    applied(bamboo, job)
