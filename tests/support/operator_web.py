"""Requests to the web ports of operators on the test cluster, and pods in place of theirs."""

import re
import urllib.error
import urllib.request

from cluster.handle import Cluster
from operator_process import PATIENCE, Operator
from waiting import until


def stand_in(cluster: Cluster, namespace: str, name: str) -> str:
    """Create a pod of that name, which nothing runs, in place of the operator's pod, and return its path."""
    container = {"name": "operator", "image": "x", "command": ["sleep", "1000"]}
    spec = {"schedulerName": "nobody", "containers": [container]}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}, namespace)
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def ask(operator: Operator, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.web_port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()
    except OSError as error:  # it has not begun
        return 0, str(error)


def until_ready(operator: Operator, expected: tuple[int, str] = (200, "ok"), seconds: float = PATIENCE) -> None:
    until(lambda: ask(operator, "/readyz") == expected, seconds, lambda: operator.said)


def step(operator: Operator) -> int:
    """Return the step of the operator's only job, by its metrics; 0 if it has none."""
    found = re.search(r"^bamboo_job_step\{.*\} (\d+)", ask(operator, "/metrics")[1], re.MULTILINE)
    return int(found[1]) if found else 0


def until_step(operator: Operator, number: int, seconds: float = PATIENCE) -> int:
    return until(lambda: found if (found := step(operator)) >= number else 0, seconds, lambda: operator.said)
