"""The operator's job page on a real control plane: real tokens, real rights, a job that really trains."""

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from bamboo_core.names import PAGE_AUDIENCE, TOKEN_AUDIENCE
from bamboo_core.page.document import RESTARTED
from cluster.handle import Cluster
from operator_jobs import small
from operator_process import Job, Operator

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

RBAC = "rbac.authorization.k8s.io"


def account(cluster: Cluster, namespace: str, name: str) -> None:
    cluster.api.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}
    )


def may_get_jobs(cluster: Cluster, namespace: str, name: str) -> None:
    rules = [{"apiGroups": ["bamboo.dev"], "resources": ["bamboojobs"], "verbs": ["get"]}]
    reference = {"apiGroup": RBAC, "kind": "Role", "name": "viewer"}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    common = {"apiVersion": f"{RBAC}/v1", "metadata": {"name": "viewer", "namespace": namespace}}
    cluster.api.create({**common, "kind": "Role", "rules": rules})
    cluster.api.create({**common, "kind": "RoleBinding", "roleRef": reference, "subjects": subjects})


def token(cluster: Cluster, namespace: str, name: str, audience: str = PAGE_AUDIENCE) -> str:
    """As `kubectl create token` makes it."""
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [audience], "expirationSeconds": 600},
    }
    made = cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", request)
    return str(made["status"]["token"])


def ask(operator: Operator, namespace: str, job: str, bearer: str) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{operator.web_port}/jobs/{namespace}/{job}/state"
    return answer_to(url, {"Authorization": f"Bearer {bearer}"})


def answer_to(url: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def until(
    operator: Operator, namespace: str, bearer: str, condition: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Until the page is such; the page. The operator may be away for a while."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            status, page = ask(operator, namespace, "page", bearer)
            if status == 200 and condition(page):
                return page
        time.sleep(0.2)
    raise AssertionError(f"the page was not as expected: {page}")


def test_the_page_is_for_those_who_may_get_the_job(installed: Cluster, namespace: str, operator: Operator) -> None:
    account(installed, namespace, "viewer")
    account(installed, namespace, "stranger")
    may_get_jobs(installed, namespace, "viewer")
    good = token(installed, namespace, "viewer")
    job = Job(installed.api, namespace, small("page"))
    job.step(12)

    status, page = ask(operator, namespace, "page", good)
    assert (status, page["state"]["name"], page["job"]["place"]) == (200, "Running", "cluster")
    ((first, second),) = page["live"]["grid"]
    assert dict(page["live"]["workers"])[first[0]] == dict(page["live"]["workers"])[second[0]] == "training"
    assert len(page["points"]) >= 10
    assert {condition["type"] for condition in page["status"]["conditions"]} >= {"Accepted", "Running"}
    assert (page["pools"][0]["name"], float(page["status"]["cost"]["perHour"])) == ("spot", 1.8)
    assert "WorkerJoined" in {event["reason"] for _, event in page["events"]}
    assert page["unknown"] == []

    installed.signal(namespace, second[0], signal.SIGKILL)
    page = until(operator, namespace, good, lambda page: page["status"]["takeovers"] == 1)
    assert {mark["kind"] for mark in page["marks"]} == {"loss", "takeover"}

    stranger = token(installed, namespace, "stranger")
    status, answer = ask(operator, namespace, "page", stranger)
    assert (status, "may not get" in answer["error"]) == (403, True)
    assert ask(operator, namespace, "page", token(installed, namespace, "viewer", TOKEN_AUDIENCE))[0] == 401
    assert ask(operator, namespace, "page", good[:-4] + "AAAA")[0] == 401
    assert ask(operator, namespace, "nobody", good)[0] == 404

    job.wait(lambda status: status.get("takeovers") == 1)  # what is written is what a new operator knows
    operator.kill()
    operator.start()
    page = until(operator, namespace, good, lambda page: page["points"])
    assert (page["status"]["takeovers"], page["marks"]) == (1, [])
    assert page["unknown"] == [RESTARTED]
    assert page["points"][0][0] > 12, "what was before is not known"
    assert page["live"]["step"] > 12

    job.edit({"suspend": True})
    job.until("Suspended")
    page = until(operator, namespace, good, lambda page: page["state"]["name"] == "Suspended")
    assert page["state"]["over"] is False
