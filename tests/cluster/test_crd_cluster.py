"""The API server's judgement of the CRD's schema and rules, compared with the tests' evaluator."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from bamboo_core.names import GROUP, PLURAL, VERSION
from cluster.api import Api, ApiError
from cluster.handle import OLDEST_SUPPORTED, Cluster
from crd_cases import EDITS, KEPT, RULES, changed, put, suspended
from crd_kit import nodes, refusals
from manifest_kit import minimal

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

Json = dict[str, Any]
TRIED = {"dryRun": "All", "fieldValidation": "Strict"}
AT_ONCE = 8


@pytest.fixture
def jobs(installed: Cluster, namespace: str) -> str:
    """The path of the namespace's jobs, on a server that knows rules; no operator watches it."""
    if installed.minor < OLDEST_SUPPORTED:
        pytest.skip("the API server is older than what Bamboo supports")
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"


Ask = Callable[[str, str, Json, dict[str, str]], Awaitable[str]]


def judged(cluster: Cluster, cases: Callable[[Ask], Awaitable[list[str]]]) -> None:
    """Run the cases, which may ask the server for its refusal, "" if it accepts; their results have to be empty."""

    async def run() -> list[str]:
        async with Api(cluster.kubeconfig) as api:

            async def ask(method: str, path: str, body: Json, query: dict[str, str]) -> str:
                try:
                    await api.text(method, path, body, **query)
                except ApiError as error:
                    if error.code not in (400, 422):
                        raise
                    return str(error)
                return ""

            return await cases(ask)

    assert asyncio.run(run()) == []


async def all_of(works: Iterable[Awaitable[str]]) -> list[str]:
    """Return the results that are not empty, with a limited number of requests at a time."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(work: Awaitable[str]) -> str:
        async with turns:
            return await work

    return [said for said in await asyncio.gather(*map(one, works)) if said]


def users(document: Json, name: Any = None) -> Json:
    """Return the parts of a document that a user writes, under another name."""
    return {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata": {"name": name or document["metadata"]["name"]},
        "spec": document["spec"],
    }


def difference(expected: list[str], server: str) -> str:
    """Compare the evaluator with the server: yes or no for a wrong value, the sentences of broken rules. "" if
    equal.
    """
    if bool(expected) != bool(server):
        return f"the evaluator says {expected or 'yes'}, the server {server or 'yes'}"
    rules = {rule["message"] for _, node in nodes() for rule in node.get("x-kubernetes-validations", ())}
    sentences = [said.partition(": ")[2] for said in expected]
    missing = [said for said in sentences if said in rules and said not in server]
    return f"the server does not say {missing} but {server}" if missing else ""


def test_the_server_and_the_parser_refuse_the_same_new_objects(installed: Cluster, jobs: str) -> None:
    async def cases(ask: Ask) -> list[str]:
        async def case(changes: Json) -> str:
            document = users(changed(changes))
            found = difference(refusals(document), await ask("POST", jobs, document, TRIED))
            return found and f"{changes}: {found}"

        return await all_of(case(changes) for changes in (*(changes for changes, _ in RULES), *KEPT))

    judged(installed, cases)


def test_the_server_and_the_parser_refuse_the_same_edits(installed: Cluster, jobs: str) -> None:
    """Old and new objects are each running and suspended."""

    async def cases(ask: Ask) -> list[str]:
        async def case(old: Json, path: str, new: Json) -> str:
            body = {**new, "metadata": old["metadata"]}
            server = await ask("PUT", f"{jobs}/{old['metadata']['name']}", body, TRIED)
            found = difference(refusals(new, {**old, "metadata": new["metadata"]}), server)
            return found and f"{path}: {found}"

        olds = [
            installed.api.request("POST", jobs, users(one, f"old-{n}"))
            for n, one in enumerate((minimal(), suspended(minimal())))
        ]
        news = [(path, put(minimal(), ("spec", *path.split(".")), value)) for path, value, _ in EDITS]
        return await all_of(
            case(old, path, users(wanted)) for old in olds for path, new in news for wanted in (new, suspended(new))
        )

    judged(installed, cases)
