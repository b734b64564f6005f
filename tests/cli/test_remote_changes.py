"""Commands that change a job."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.names import API_VERSION
from remote_command_kit import MANIFEST, Fake, type_in
from remote_kit import SPEC, Asked, condition, job


def test_a_manifests_mistakes_are_those_of_validate(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(MANIFEST.replace("steps: 3", "steps: 0").replace("stages: 2", "stags: 2"))
    expected = CliRunner().invoke(app, ["validate", str(wrong)])
    found = CliRunner().invoke(app, ["submit", str(wrong), "--kubeconfig", "/no/such"])
    assert (found.exit_code, expected.exit_code) == (2, 2)
    assert found.stderr.splitlines() == expected.stderr.splitlines()
    assert len(found.stderr.splitlines()) >= 2


def test_a_job_is_applied_without_what_is_the_servers(tmp_path: Path) -> None:
    code, printed, _, asked = type_in(tmp_path, Fake(job(), there=False), "submit", "FILE")
    assert (code, printed.splitlines()[0]) == (0, "story created in namespace team")
    patch = next(one for one in asked if one.method == "PATCH")
    assert patch.query == {"fieldManager": "bamboo", "force": "false"}
    assert patch.headers["Content-Type"] == "application/apply-patch+yaml"
    assert patch.body["metadata"] == {"name": "story", "namespace": "team"}
    assert "status" not in patch.body
    assert patch.body["apiVersion"] == patch.path.removeprefix("/apis/").partition("/namespaces")[0] == API_VERSION


def test_who_resumes_a_job_without_money_need_not_wait(tmp_path: Path) -> None:
    class Spent(Fake):
        """A server that reports the job as suspended by its budget once a client has patched the job."""

        def __call__(self, asked: Asked) -> tuple[int, Any]:
            answer = super().__call__(asked)
            if asked.method == "PATCH":
                spent = condition("Suspended", True, "BudgetSpent", "the budget of 5 is spent; a larger one helps")
                self.body = job(state="Suspended", conditions=[spent])
            return answer

    suspended = job(spec={**SPEC, "suspend": True}, conditions=[condition("Suspended", True, "Suspended")])
    code, _, complained, _ = type_in(tmp_path, Spent(suspended), "resume", "story", "--wait", "--timeout", "9s")
    said = "bamboo: story does not start to train: the budget of 5 is spent; a larger one helps\n"
    assert (code, complained) == (1, said)


def test_a_manifests_namespace_is_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(MANIFEST.replace("name: story", "name: story, namespace: other"))
    fake = Fake(job(), there=False)
    _, _, _, asked = type_in(tmp_path, fake, "submit", str(other), "-q")
    assert any("/namespaces/other/" in one.path for one in asked if one.method == "PATCH")
    code, _, complained, _ = type_in(tmp_path, fake, "submit", str(other), "-n", "team")
    assert (code, "metadata.namespace is other, but namespace team" in complained) == (2, True)
