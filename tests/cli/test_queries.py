"""Commands that show jobs."""

import json
from pathlib import Path

import pytest

from remote_command_kit import Fake, type_in
from remote_kit import job


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tables 300 columns wide, on any terminal."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list"], "NAME   STATE"),
        (["list", "-A"], "NAMESPACE  NAME"),
        (["status", "story"], "step 100/1000, loss 2.5000"),
        (["status", "bj/story"], "node-1  zone-1"),
        (["status", "FILE"], "OfBambooJob: a sentence"),
        (["status", "story"], "w4      standby"),
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
