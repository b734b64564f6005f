"""The remote commands with a real API server and operator: what a user types, and the effect."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from cluster.client import ApiError, Json
from cluster.handle import Cluster
from operator_jobs import small
from operator_process import SYSTEM, Job, Operator, condition
from waiting import until

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

BAMBOO = [sys.executable, "-m", "bamboo"]


def complaints(errors: str) -> str:
    """Return a command's errors without the warning about a single pipeline, which `submit` prints for small jobs."""
    return "".join(line for line in errors.splitlines(keepends=True) if not line.startswith("warning: one pipeline"))


class Shell:
    """A user's shell, with the given kubeconfig and the test's namespace."""

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path) -> None:
        self.namespace, self.folder = namespace, folder
        self.env = {**os.environ, "KUBECONFIG": str(kubeconfig), "COLUMNS": "300"}

    def type(self, *words: str, code: int = 0) -> str:
        """Run a command in this process, which is faster than starting another one. Return its output, or its errors if
        the expected exit code is not 0. `submit` and `run` do not load the task, which would take seconds.
        """
        if words[0] in ("submit", "run"):
            words += ("--no-load",)
        done = CliRunner().invoke(app, [*words, "-n", self.namespace], env=self.env)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert "Traceback" not in done.output
        assert done.exit_code == code, done.output
        if not code:
            assert complaints(done.stderr) == "", done.stderr
        return complaints(done.stderr) if code else done.stdout

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*BAMBOO, *words, "-n", self.namespace],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
        )

    def file(self, manifest: Json) -> str:
        path = self.folder / f"{manifest['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(manifest))
        return str(path)


@pytest.fixture
def shell(installed: Cluster, namespace: str, tmp_path: Path) -> Shell:
    return Shell(installed.kubeconfig, namespace, tmp_path)


class Submitted(Job):
    """A job that a command has already created."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.api, self.namespace, self.name = cluster.api, namespace, name
        self.path = f"/apis/bamboo.dev/v1alpha1/namespaces/{namespace}/bamboojobs/{name}"


def _whole(status: Json) -> bool:
    """Return whether the job runs with all its workers, and each stage has a second copy."""
    return all(
        condition(status, kind).get("status") == value
        for kind, value in (("Running", "True"), ("WorkersReady", "True"), ("Degraded", "False"))
    )


@pytest.mark.slow
def test_a_jobs_life_on_the_command_line(installed: Cluster, namespace: str, operator: Operator, shell: Shell) -> None:
    document = small("story", standby=1)
    file = shell.file(document)
    assert "created" in shell.type("submit", file, "--dry-run")
    assert shell.type("list").strip() == f"no jobs in namespace {namespace}"
    assert shell.type("submit", file).startswith(f"story created in namespace {namespace}\n")
    assert "job story exists in namespace" in shell.type("submit", file, code=1)
    assert "unchanged" in shell.type("submit", file, "--apply")
    job = Submitted(installed, namespace, "story")
    job.wait(_whole)

    # what there is to see
    row = shell.type("list").splitlines()[1].split()
    assert (row[0], row[1], row[3], row[4]) == ("story", "Running", "1/1", "3/3")
    job.step(1)
    status = shell.type("status", "bj/story")
    for part in (
        "pipeline ┃ stage 0 ┃ stage 1",
        "Running",
        "loss ",
        "cost ",
        "zone-",
        "Spot",
        "Started: training begins: 1 pipeline",
    ):
        assert part in status, status
    assert re.search(r"w\d +training +0/0 +spot-", status), status
    events = shell.type("events", file)
    assert events.index("WorkerJoined") < events.index("Started")
    assert json.loads(shell.type("status", "story", "-o", "json"))["status"]["state"] == "Running"

    # drills
    told = shell.type("preempt", "story", "--stage", "1")
    assert "gets notice: its pod is deleted, with 30 s of grace" in told
    assert "other workers run its stages" in told
    assert re.search(r"w\d+ has left", told), told
    assert "every stage has a second copy again" in told
    before = job.wait(_whole)["preemptions"]
    told = shell.type("preempt", "story", "--random", "--kill", "--yes")
    assert "without notice: its pod is deleted by force" in told
    assert "other workers run its stages" in told
    assert job.wait(_whole)["preemptions"] > before

    # the end
    lost = shell.type("suspend", "story", code=2)
    assert "story saves no checkpoints: it will start from step 0" in lost
    assert "is suspended, and its workers are gone" in shell.type("suspend", "story", "--yes", "--wait")
    assert job.pods() == {}
    assert "story is already suspended" in shell.type("suspend", "story")
    assert "story trains" in shell.type("resume", "story", "--wait")
    assert "story is not over" in shell.type("delete", "story", code=2)
    assert "story and its workers are gone" in shell.type("delete", "story", "--yes")
    assert job.pods() == {}
    assert shell.type("status", "story", code=1) == f"bamboo: there is no job story in namespace {namespace}\n"


def _until(process: "subprocess.Popen[str]", pattern: str, seconds: float = 90) -> str:
    """Return the first output line that matches. Raises AssertionError if output ends, or goes on past `seconds`."""
    assert process.stdout is not None
    end, seen = time.monotonic() + seconds, []
    while time.monotonic() < end and (line := process.stdout.readline()):
        seen.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no line like {pattern}: {seen[-20:]}")


READ = {"apiGroups": ["bamboo.dev"], "resources": ["bamboojobs"], "verbs": ["get", "list"]}


def test_what_the_server_refuses_is_said(installed: Cluster, namespace: str, shell: Shell) -> None:
    """Commands say why they or the API server refuse a job or an edit. No operator runs."""
    wrong = small("wrong")
    wrong["spec"]["topology"]["stages"] = 0
    assert "spec.topology.stages: expected" in shell.type("submit", shell.file(wrong), code=2)
    lost = Shell(installed.kubeconfig, "no-such-namespace", shell.folder)
    assert "there is no namespace no-such-namespace" in lost.type("submit", shell.file(small("lost")), code=1)
    shell.type("submit", "-q", shell.file(small("scaled")))
    path = f"/apis/bamboo.dev/v1alpha1/namespaces/{namespace}/bamboojobs/scaled"
    installed.api.request(
        "PATCH",
        f"{path}?fieldManager=other",
        {"spec": {"standby": {"workers": 2}}},
        content="application/merge-patch+json",
    )
    again = shell.file(small("scaled", standby=1))
    assert "spec.standby.workers; --force takes these fields over" in shell.type("submit", again, "--apply", code=1)
    assert "scaled changed" in shell.type("submit", again, "--apply", "--force")
    assert installed.api.get(path)["spec"]["standby"]["workers"] == 1
    assert "no operator has seen this job yet" in shell.type("status", "scaled")
    assert "did not start to train within 1 s" in _resumed(shell)


def _resumed(shell: Shell) -> str:
    shell.type("suspend", "scaled")
    return shell.type("resume", "scaled", "--wait", "--timeout", "1s", code=1)


@pytest.fixture
def operator_pod(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[str]:
    """Run the operator in a pod with its own ServiceAccount, as the chart does. Yield the namespace that it watches."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    command = ["python", "-m", "bamboo_operator", "--listen", "$(IP):8765", "--web-listen", "$(IP):8080"]
    container = {
        "name": "operator",
        "image": "bamboo/operator",
        "ports": [{"name": "web", "containerPort": 8080}],
        "command": [*command, "--namespace", namespace, "--key-file", str(tmp_path / "key")],
        "env": [address],
    }
    meta = {
        "name": f"operator-{namespace}",
        "namespace": SYSTEM,
        "labels": {"app.kubernetes.io/name": "bamboo-operator"},
    }
    spec = {"containers": [container], "serviceAccountName": "bamboo-operator"}
    installed.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    path = f"/api/v1/namespaces/{SYSTEM}/pods/{meta['name']}"
    try:
        running = installed.api.wait(path, lambda pod: pod["status"].get("phase") == "Running")
        until(lambda: _is_healthy(f"http://{running['status']['podIP']}:8080/healthz"), 60)
        yield namespace
    finally:
        print(installed.logs(SYSTEM, str(meta["name"])))
        installed.api.delete(path, seconds=0)


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def test_the_page_is_shown_through_a_tunnel_with_a_token_of_its_own(
    installed: Cluster, operator_pod: str, shell: Shell
) -> None:
    namespace = operator_pod
    shell.type("submit", "-q", shell.file(small("shown", suspend=True)))  # a page needs no worker
    Submitted(installed, namespace, "shown").until("Suspended")
    refused = shell.type("page", "shown", "--service-account", "nobody", code=1)
    assert f"there is no ServiceAccount nobody in namespace {SYSTEM}" in refused
    _may_look(installed, namespace)
    page = shell.start("page", "shown")
    try:
        url = _until(page, "^http://")
        found = re.fullmatch(rf"(http://127\.0\.0\.1:\d+/jobs/{namespace}/shown/)#token=(\S+)\n", url)
        assert found, url
        status, html = _fetch(found[1], None)
        assert (status, "<html" in html.lower()) == (200, True)
        assert _fetch(f"{found[1]}state", None)[0] == 401
        status, text = _fetch(f"{found[1]}state", found[2])
        assert (status, "shown" in text) == (200, True)
        assert _fetch(f"{found[1].replace('/shown/', '/other/')}state", found[2])[0] == 404
        address = found[1].split("/")[2].split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=10) as held:  # a browser keeps its own
            held.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert held.recv(100).startswith(b"HTTP/1.1 200")
            page.send_signal(signal.SIGINT)
            rest, complaints = page.communicate(timeout=20)
        assert (page.returncode, complaints) == (130, ""), rest
    finally:
        page.kill()
        page.wait()


def _may_look(cluster: Cluster, namespace: str) -> None:
    """Let the ServiceAccount that `page` uses read this namespace's jobs. Create it if it does not exist."""
    rbac, account = "rbac.authorization.k8s.io", {"name": "bamboo-page", "namespace": SYSTEM}
    meta = {"name": "bamboo-page", "namespace": namespace}
    with contextlib.suppress(ApiError):
        cluster.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    cluster.api.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": [READ]})
    cluster.api.create(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "bamboo-page"},
            "subjects": [{"kind": "ServiceAccount", **account}],
        }
    )


def _fetch(url: str, token: str | None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
