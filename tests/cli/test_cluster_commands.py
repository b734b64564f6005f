"""The remote commands as they are typed: flags, errors and exit codes, against a small HTTP server; completion."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.job.pod_fields import NEWEST_MINOR
from remote_command_kit import MANIFEST, Fake, type_in
from remote_kit import Asked, Json, condition, job, kubeconfig, refusal, server

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as they need, whatever terminal the tests have."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list"], "NAME   STATE"),
        (["get", "story", "-o", "name"], "bamboojob.bamboo.dev/story\n"),
        (["list", "-A"], "NAMESPACE  NAME"),
        (["list", "-o", "wide"], "TAKEOVERS"),
        (["status", "story"], "step 100/1000, loss 2.5000"),
        (["status", "bj/story"], "node-1  zone-1"),
        (["status", "FILE"], "OfBambooJob: a sentence"),
        (["top"], "1 job, 1 running"),
        (["top", "story"], "w4      spare"),
        (["events", "story"], "OfPod: w1: a sentence"),
        (["events", "story", "-o", "json"], '"reason": "OfPod"'),
        (["logs", "story"], "w1 | last\n"),
        (["logs", "story", "w1"], "first\nlast\n"),
        (["logs", "story", "w0", "w1", "--no-prefix"], "first\nlast\nfirst\nlast\n"),
        (["resume", "story"], "story is not suspended"),
    ],
)
def test_a_command_prints_what_it_was_asked_for_and_complains_of_nothing(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, printed, complained, _ = type_in(tmp_path, Fake(job()), *arguments)
    assert (code, complained) == (0, "")
    assert said in printed


def test_objects_come_as_the_server_has_them(tmp_path: Path) -> None:
    body = job()
    body["metadata"]["managedFields"] = [{"manager": "x"}]
    _, printed, _, _ = type_in(tmp_path, Fake(body), "status", "story", "-o", "json")
    found = json.loads(printed)
    assert "managedFields" not in found["metadata"]
    assert found["status"] == job()["status"]
    _, printed, _, _ = type_in(tmp_path, Fake(body), "list", "-o", "json")
    assert [item["metadata"]["name"] for item in json.loads(printed)["items"]] == ["story"]


OVER = job(state="Failed", conditions=[condition("Failed", True, "StageLost", "stage 1 is lost")])


PENDING = job(conditions=[condition("Running", False)], plan=None)


@pytest.mark.parametrize(
    ("body", "arguments", "code", "said"),
    [
        (job(), ["status", "other"], 1, "bamboo: there is no job other in namespace team\n"),
        (job(), ["status", "other", "-n", "else"], 1, "bamboo: there is no job other in namespace else\n"),
        (job(), ["status", "story", "-n", "No!"], 2, "--namespace No!: expected the name of a namespace"),
        (
            job(),
            ["status", "story", "--context", "x"],
            2,
            "--context x: no such context; expected one of here, elsewhere",
        ),
        (job(), ["status", "story", "-w", "-o", "json"], 2, "--output json: cannot be watched"),
        (job(), ["status", "No"], 2, "No: expected the name of a job"),
        (job(), ["list", "-A", "-n", "team"], 2, "--all-namespaces: cannot be combined with JOB"),
        (job(), ["logs", "story", "w9"], 1, "story has no worker w9; there are: w0, w1"),
        (job(), ["logs", "story", "-p"], 1, "story has no workers that have ended"),
        (job(), ["suspend", "story"], 2, "which loses its 100 steps; pass --yes to do it anyway"),
        (job(), ["delete", "story"], 2, "story is not over (Running, step 100/1000"),
        (OVER, ["suspend", "story"], 1, "story is over (Failed); it cannot be suspended"),
        (OVER, ["resume", "story"], 1, "story is over (Failed); submit it again"),
        (OVER, ["preempt", "story", "--random"], 1, "is not training (Failed: stage 1 is lost)"),
        (PENDING, ["preempt", "story", "--random"], 1, "story is not training"),
        (job(), ["preempt", "story"], 2, "expected one of --worker, --stage and --random"),
        (job(), ["preempt", "story", "--random", "--node", "--no-wait"], 2, "--node --no-wait"),
        (job(), ["submit", "FILE"], 1, "job story exists in namespace team (Running); --apply merges"),
        (job(), ["submit", "FILE", "--force"], 2, "--force: expected together with --apply"),
        (job(), ["submit", "FILE", "--dry-run", "-w"], 2, "leave out one of --dry-run and --watch"),
        (job(), ["page", "story"], 1, "no running bamboo-operator was found in the cluster"),
    ],
)
def test_what_is_refused_and_how(tmp_path: Path, body: Json, arguments: list[str], code: int, said: str) -> None:
    fake = Fake(body)
    if arguments[0] == "page":
        fake.body["metadata"]["name"] = "story"

        def none_running(asked: Asked, inner: Any = fake.__call__) -> tuple[int, Any]:
            return (200, {"items": []}) if asked.path == "/api/v1/pods" else inner(asked)

        fake = none_running  # type: ignore[assignment]
    found, _, complained, asked = type_in(tmp_path, fake, *arguments)
    assert (found, said in complained) == (code, True), complained
    assert all(one.method == "GET" for one in asked), "something was changed"


def test_a_manifests_mistakes_are_those_of_validate(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(MANIFEST.replace("steps: 3", "steps: 0").replace("stages: 2", "stags: 2"))
    expected = CliRunner().invoke(app, ["validate", str(wrong)])
    found = CliRunner().invoke(app, ["submit", str(wrong), "--kubeconfig", "/no/such"])
    assert (found.exit_code, expected.exit_code) == (2, 2)
    assert found.stderr.splitlines() == expected.stderr.splitlines()
    assert len(found.stderr.splitlines()) >= 2


def test_a_misspelt_field_of_the_template_is_refused_unless_the_cluster_is_newer_than_we_know(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    template = "{spec: {tolerations: [{operater: Exists}]}}"
    wrong.write_text(MANIFEST.replace("status:", f"  worker: {{template: {template}}}\nstatus:"))
    fake = Fake(job(), there=False)
    code, _, complained, asked = type_in(tmp_path, fake, "submit", str(wrong))
    path = "spec.worker.template.spec.tolerations[0].operater"
    warning, said = complained.splitlines()
    assert warning.startswith("warning: one pipeline: the job ends if")
    assert (code, said) == (2, f"bamboo: {wrong}:9: {path}: unknown field, did you mean operator?")
    assert all(one.method == "GET" for one in asked), "something was changed"
    fake.minor = str(NEWEST_MINOR + 1)
    assert type_in(tmp_path, fake, "submit", str(wrong))[0] == 0


def test_a_busy_api_server_is_asked_again(tmp_path: Path) -> None:
    fake, said = Fake(job(), there=False), []

    def busy(asked: Asked) -> tuple[int, Any]:
        said.append(asked.method)
        if said.count(asked.method) == 1:
            return refusal(429, "TooManyRequests", "storage is (re)initializing")
        return fake(asked)

    code, printed, _, _ = type_in(tmp_path, busy, "submit", "FILE")  # type: ignore[arg-type]
    assert (code, printed.splitlines()[0]) == (0, "story created in namespace team")
    assert said == ["GET", "GET", "GET", "PATCH", "PATCH"]  # the second one finds no job, the third one the CRD


def test_a_job_is_applied_without_what_is_the_servers(tmp_path: Path) -> None:
    code, printed, _, asked = type_in(tmp_path, Fake(job(), there=False), "submit", "FILE")
    assert (code, printed.splitlines()[0]) == (0, "story created in namespace team")
    patch = next(one for one in asked if one.method == "PATCH")
    assert patch.query == {"fieldManager": "bamboo", "force": "false"}
    assert patch.headers["Content-Type"] == "application/apply-patch+yaml"
    assert patch.body["metadata"] == {"name": "story", "namespace": "team"}
    assert "status" not in patch.body


def test_a_manifests_namespace_is_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(MANIFEST.replace("name: story", "name: story, namespace: other"))
    fake = Fake(job(), there=False)
    _, _, _, asked = type_in(tmp_path, fake, "submit", str(other), "-q")
    assert any("/namespaces/other/" in one.path for one in asked if one.method == "PATCH")
    code, _, complained, _ = type_in(tmp_path, fake, "submit", str(other), "-n", "team")
    assert (code, "metadata.namespace is other, but --namespace team" in complained) == (2, True)


def test_run_on_a_cluster_is_submit_and_watch(tmp_path: Path) -> None:
    code, printed, complained, _ = type_in(tmp_path, Fake(OVER, there=False), "run", "FILE", "--on", "cluster")
    assert (code, complained.count("\n"), complained.startswith("warning: one pipeline:")) == (3, 1, True)
    assert printed.splitlines()[0] == "story created in namespace team"
    assert printed.splitlines()[-1] == "Failed: stage 1 is lost"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--on", "cluster", "--verify"], "--verify: cannot be combined with --on cluster"),
        (["--on", "cluster", "--seed", "0"], "--seed: cannot be combined with --on cluster"),
        (["--namespace", "x"], "--namespace: cannot be combined with --on here"),
    ],
)
def test_flags_of_the_other_place_are_refused(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "job.yaml").write_text(MANIFEST)
    done = CliRunner().invoke(app, ["run", str(tmp_path / "job.yaml"), *flags])
    assert (done.exit_code, said in done.stderr) == (2, True)


def test_who_may_not_look_at_pods_still_sees_the_job(tmp_path: Path) -> None:
    fake = Fake(job(), forbidden=("/pods", "/events"))
    code, printed, _, _ = type_in(tmp_path, fake, "status", "story")
    assert code == 0
    assert "step 100/1000" in printed
    assert 'not shown: workers: permission denied: pods is forbidden: User "u" cannot list resource "pods"' in printed
    code, _, complained, _ = type_in(tmp_path, fake, "logs", "story")
    assert (code, 'cannot list resource "pods"' in complained) == (1, True)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    with server(Fake(job())) as (url, _):
        path = kubeconfig(tmp_path / "config", url)
        command = f"{BIN}/bamboo logs story --kubeconfig {path} | head -1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("w0 | first\n0\n", "")


def test_nothing_heavy_is_imported_for_help() -> None:
    heavy = "[m for m in ('aiohttp', 'asyncio', 'torch') if m in sys.modules]"
    code = f"import sys, bamboo.cli.commands, bamboo.cli.cluster.kubectl_plugin; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
