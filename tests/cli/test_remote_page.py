"""The way to a job's page: which operator has the job, and how its secret URL gets into the browser."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bamboo.remote.operator_pods import arguments, operator_for
from bamboo.remote.page import address_of
from bamboo_core.job.api_object import Metadata
from bamboo_core.job.manifest import read_spec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.view.job_view import JobView
from remote_command_kit import Fake, type_in
from remote_kit import Json, job


def operator(name: str, *args: str) -> Json:
    container = {"name": "operator", "command": ["python", "-m", "bamboo_operator"], "args": ["--verbose", *args]}
    return {"metadata": {"name": name, "namespace": "bamboo-system"}, "spec": {"containers": [container]}}


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
    """A real browser's part is played by a program that keeps what it was given."""
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


PAGE = "https://bamboo.example/x/jobs/team/story/"


def at(page: str | None) -> JobView:
    status = BambooJobStatus(page=page)
    return JobView(metadata=Metadata(name="story", namespace="team"), spec=read_spec({}), status=status)


@pytest.mark.parametrize(
    ("pages", "listed", "found"),
    [
        ([PAGE], False, PAGE),
        ([PAGE], True, "https://bamboo.example/x/jobs/?namespace=team"),
        ([None, PAGE], True, "https://bamboo.example/x/jobs/?namespace=team"),
        ([None], False, None),
        ([], True, None),
        (["file:///etc/passwd"], False, None),
    ],
)
def test_where_people_find_a_page_is_in_a_jobs_status(pages: list[str | None], listed: bool, found: str | None) -> None:
    assert address_of([at(page) for page in pages], listed=listed) == found


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["page", "story"], PAGE), (["page"], "https://bamboo.example/x/jobs/?namespace=team")],
)
def test_an_address_for_people_needs_rights_on_the_job_alone(
    tmp_path: Path, arguments: list[str], printed: str
) -> None:
    fake = Fake(job(page=PAGE))
    code, said, complained, asked = type_in(tmp_path, fake, *arguments)
    assert (code, said.split(), complained) == (0, [printed], "")
    assert {one.path.partition("bamboojobs")[0] for one in asked} == {"/apis/bamboo.dev/v1alpha1/namespaces/team/"}
