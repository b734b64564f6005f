"""The API server's verdicts by the CRD's schema and rules, compared with `crd_kit.refusals`."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from bamboo_core.names import GROUP, PLURAL, VERSION
from cluster.client import ApiError
from cluster.handle import OLDEST_SUPPORTED, Cluster
from crd_cases import EDITS, KEPT, RULES, changed, put, suspended
from crd_kit import nodes, refusals
from manifest_kit import minimal

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

Json = dict[str, Any]
TRIED = {"dryRun": "All", "fieldValidation": "Strict"}
AT_ONCE = 8


@pytest.fixture
def jobs(installed: Cluster, namespace: str) -> str:
    """Return the URL path of the namespace's jobs, on a server that knows CEL rules; no operator watches them."""
    if installed.minor < OLDEST_SUPPORTED:
        pytest.skip("the API server is older than what Bamboo supports")
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"


def refusal(cluster: Cluster, method: str, path: str, body: Json) -> str:
    """Return the message with which the server refuses a dry-run request; "" if the server accepts it."""
    try:
        cluster.api.text(method, path, body, **TRIED)
    except ApiError as error:
        if error.code not in (400, 422):
            raise
        return str(error)
    return ""


def differences(cases: Iterable[Callable[[], str]]) -> list[str]:
    """Run the cases, AT_ONCE at a time, and return the results that are not empty."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [found for found in pool.map(lambda case: case(), cases) if found]


def users(document: Json, name: Any = None) -> Json:
    """Return the fields of a document that a user writes, without labels and status. name: replaces its name."""
    return {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata": {"name": name or document["metadata"]["name"]},
        "spec": document["spec"],
    }


def difference(expected: list[str], server: str) -> str:
    """Return how the server's verdict, or its sentences about broken rules, differ from the evaluator's; "" if they
    agree.
    """
    if bool(expected) != bool(server):
        return f"the evaluator says {expected or 'yes'}, the server {server or 'yes'}"
    rules = {rule["message"] for _, node in nodes() for rule in node.get("x-kubernetes-validations", ())}
    sentences = [said.partition(": ")[2] for said in expected]
    missing = [said for said in sentences if said in rules and said not in server]
    return f"the server does not say {missing} but {server}" if missing else ""


def test_the_server_and_the_parser_refuse_the_same_new_objects(installed: Cluster, jobs: str) -> None:
    def case(changes: Json) -> str:
        document = users(changed(changes))
        found = difference(refusals(document), refusal(installed, "POST", jobs, document))
        return found and f"{changes}: {found}"

    assert differences(partial(case, changes) for changes in (*(changes for changes, _ in RULES), *KEPT)) == []


def test_the_server_and_the_parser_refuse_the_same_edits(installed: Cluster, jobs: str) -> None:
    """The old and the new object are each tried as running and as suspended."""

    def case(old: Json, path: str, new: Json) -> str:
        body = {**new, "metadata": old["metadata"]}
        server = refusal(installed, "PUT", f"{jobs}/{old['metadata']['name']}", body)
        found = difference(refusals(new, {**old, "metadata": new["metadata"]}), server)
        return found and f"{path}: {found}"

    olds = [
        installed.api.request("POST", jobs, users(one, f"old-{n}"))
        for n, one in enumerate((minimal(), suspended(minimal())))
    ]
    news = [(path, put(minimal(), ("spec", *path.split(".")), value)) for path, value, _ in EDITS]
    cases = (
        partial(case, old, path, users(wanted))
        for old in olds
        for path, new in news
        for wanted in (new, suspended(new))
    )
    assert differences(cases) == []
