"""`bamboo bug-report`: what is in the archive, and what must not be."""

import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo.remote.bug_report import HIDDEN, hidden, without_secrets
from diagnosis_kit import operator_pod
from remote_command_kit import Fake, type_in
from remote_kit import SPEC, Asked, job

JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJqb2IifQ.c2lnbmF0dXJl"
SECRETS = [JWT, "AKIAABCDEFGHIJKLMNOP", "hf_abcdefghijklmnopqrstuv", "ghp_abcdefghijklmnopqrstuv0123"]


class Leaky(Fake):
    """Everything on this cluster has a secret in it somewhere."""

    def __call__(self, asked: Asked) -> tuple[int, Any]:
        if asked.path == "/api/v1/pods":
            pod = operator_pod()
            pod["spec"]["containers"][0]["env"] = [{"name": "AWS_SECRET_ACCESS_KEY", "value": "very-secret"}]
            pod["metadata"]["annotations"] = {"note": "very-secret"}
            return 200, {"items": [pod]}
        if asked.path.endswith("/log"):
            return 200, f"begins\nAuthorization: Bearer {SECRETS[2]}\n{JWT}\nends\n".encode()
        return super().__call__(asked)


def leaky_job() -> dict[str, Any]:
    config = {"apiToken": "very-secret", "url": "https://me:very-secret@host/x", "width": 7}
    return job(spec={**SPEC, "task": {"entrypoint": "a.b:c", "config": config}})


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = [one for one in archive.getmembers() if one.isfile()]
        return {one.name.split("/", 1)[1]: archive.extractfile(one).read().decode() for one in members}  # type: ignore[union-attr]


def test_the_archive_has_what_is_needed_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    code, out, err, asked = type_in(tmp_path, Leaky(leaky_job()), "bug-report", "story", "-o", str(path))
    assert (code, err) == (0, "")
    assert "report.tar.gz" in out
    files = unpacked(path)
    assert {"versions.txt", "doctor.json", "job.json", "pods.json", "events.json", "nodes.json"} <= files.keys()
    assert {"operator/bamboo-operator-1.log", "workers/story-w0.log"} <= files.keys()
    assert "begins" in files["workers/story-w0.log"]
    assert "ends" in files["workers/story-w0.log"]
    whole = "".join(files.values())
    assert "very-secret" not in whole
    assert not [secret for secret in SECRETS if secret in whole]
    assert json.loads(files["job.json"])["spec"]["task"]["config"]["width"] == 7
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {one.method for one in asked} <= {"GET", "POST"}
    assert [p.name for p in tmp_path.glob(".report*")] == []


def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    fake = Fake(job(), forbidden=("/events", "/log"))
    assert type_in(tmp_path, fake, "bug-report", "story", "-o", str(path))[0] == 0
    missing = unpacked(path)["missing.txt"]
    assert "events: permission denied" in missing
    assert "log of team/story-w0: permission denied" in missing


def test_no_file_is_overwritten_and_no_job_invented(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    path.write_text("mine")
    code, _, err, asked = type_in(tmp_path, Leaky(leaky_job()), "bug-report", "-o", str(path))
    assert (code, asked, path.read_text()) == (2, [], "mine")
    assert "it exists" in err
    code, _, err, _ = type_in(tmp_path, Fake(job(), there=False), "bug-report", "story", "-o", str(tmp_path / "new"))
    assert code == 1
    assert "there is no job story" in err
    assert not (tmp_path / "new").exists()
    code, _, err, _ = type_in(tmp_path, Leaky(leaky_job()), "bug-report", "-o", str(tmp_path / "no" / "new"))
    assert code == 1
    assert "cannot be written" in err


@pytest.mark.parametrize("secret", SECRETS)
def test_tokens_in_text_are_hidden(secret: str) -> None:
    assert hidden(f"x {secret} y") == f"x {HIDDEN} y"


@given(st.text(alphabet="abcdefgh 0123456789,:()", max_size=60))
def test_other_text_stays(text: str) -> None:
    assert hidden(text) == text


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"env": [{"name": "A", "value": "x"}]}, {"env": [{"name": "A", "value": HIDDEN}]}),
        (
            {"env": [{"name": "A", "valueFrom": {"fieldRef": 1}}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": 1}}]},
        ),
        ({"annotations": {"a": "x"}}, {"annotations": {"a": HIDDEN}}),
        ({"password": "x", "tokensPerSample": True}, {"password": HIDDEN, "tokensPerSample": True}),
        ({"metadata": {"managedFields": [1], "name": "n"}}, {"metadata": {"name": "n"}}),
        ({"uri": "s3://u:p@bucket/x"}, {"uri": f"s3://{HIDDEN}@bucket/x"}),
    ],
)
def test_objects_lose_their_secrets(value: Any, kept: Any) -> None:
    assert without_secrets(value) == kept
