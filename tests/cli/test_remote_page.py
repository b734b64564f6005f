"""The choice of the operator that serves a job's page, and the file by which the browser gets the page's secret URL."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bamboo.remote.operator_pods import arguments, operator_for
from remote_kit import Json


def operator(name: str, *args: str) -> Json:
    container = {"name": "operator", "command": ["python", "-m", "bamboo_operator"], "args": ["--verbose", *args]}
    metadata, status = {"name": name, "namespace": "bamboo-system"}, {"phase": "Running"}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": status}


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ([], set()),
        (["--namespace=a"], {"a"}),
        (["--namespace", "a", "--url=x", "--namespace=b"], {"a", "b"}),
        (["--namespaces=a"], set()),
    ],
)
def test_what_an_operator_watches_is_in_its_arguments(args: list[str], names: set[str]) -> None:
    assert arguments(operator("o", *args), "--namespace") == names


@pytest.mark.parametrize(
    ("operators", "found"),
    [
        ({"a": ["team"], "b": ["other"]}, "a"),
        ({"a": ["other"], "b": ["other", "team"]}, "b"),
        ({"a": [], "b": ["other"]}, "a"),
        ({"a": [], "b": ["team"]}, "b"),
        ({"a": ["other"]}, "a"),  # there is no other one
        ({"a": [], "b": []}, None),
        ({"a": ["team"], "b": ["team"]}, None),
        ({"a": ["x"], "b": ["y"]}, None),
    ],
)
def test_the_operator_of_the_jobs_namespace_is_asked(operators: dict[str, list[str]], found: str | None) -> None:
    pods = [operator(name, *(f"--namespace={n}" for n in names)) for name, names in operators.items()]
    chosen = operator_for(pods, "team")
    assert (chosen and chosen["metadata"]["name"]) == found


@pytest.mark.parametrize(("active", "instances", "found"), [(1, "xx", "b"), (None, "xx", "a"), (None, "xy", None)])
def test_of_several_replicas_the_one_that_works_is_asked(active: int | None, instances: str, found: str | None) -> None:
    pods = [operator("a"), operator("b")]
    for pod, instance in zip(pods, instances, strict=True):
        pod["metadata"]["labels"] = {"app.kubernetes.io/instance": instance}
    if active is not None:
        pods[active]["metadata"]["labels"]["bamboo.dev/active"] = "true"
    chosen = operator_for(pods, "team")
    assert (chosen and chosen["metadata"]["name"]) == found


URL = "http://127.0.0.1:1/jobs/team/story/#token=a.b-c&d"
SHOW = "import asyncio, sys; from bamboo.remote.page import show; sys.exit(not asyncio.run(show(sys.argv[1], 1)))"


def test_the_browser_gets_the_url_by_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    """The test's browser is a program that stores its arguments and a copy of the page."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$*" >{tmp_path}/argv\ncp -p "${{1#file://}}" {tmp_path}/page\n')
    browser.chmod(0o700)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "BROWSER": f"{browser} %s", "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", SHOW, URL]
    subprocess.run(command, env=environment, check=True, timeout=60)
    given = (tmp_path / "argv").read_text()
    assert re.fullmatch(rf"file://{scratch}/bamboo-\w+\.html", given)
    page = tmp_path / "page"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert f'content="0; url={URL.replace("&", "&amp;")}"' in page.read_text()
    assert list(scratch.iterdir()) == [], "the file is still there"
