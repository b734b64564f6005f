"""What the operator asks of the API server, and what it makes of refusals."""

from collections.abc import Mapping
from typing import Any

import pytest

from bamboo_core.kube.connection import JSON
from bamboo_core.kube.errors import ApiError
from bamboo_operator.kube.client import ApiClient, JobGone, PodRefused

POD = "/api/v1/namespaces/team/pods/job-w0"
JOB = "/apis/bamboo.dev/v1alpha1/namespaces/team/bamboojobs/job"
TAKEN, MISSING = ApiError(409, "Conflict", "taken"), ApiError(404, "NotFound", "there is none")


class Scripted:
    """A connection that answers in turn, by method; what is an error is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self._answers = answers
        self.calls: list[tuple[str, str, Any, Any, str]] = []

    async def call(
        self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None, kind: str = JSON
    ) -> dict[str, Any]:
        self.calls.append((method, path, body, query, kind))
        answer = self._answers[method].pop(0) if method in self._answers else {}
        if isinstance(answer, Exception):
            raise answer
        return answer


def uid(value: str | None) -> dict[str, Any]:
    """The list of the object of that name; None: there is none."""
    return {"items": [] if value is None else [{"metadata": {"uid": value}}]}


async def test_only_that_very_pod_is_deleted() -> None:
    server = Scripted()
    assert await ApiClient(server).delete_pod("team", "job-w0", "u1", grace_seconds=5)
    ((method, path, body, *_),) = server.calls
    assert (method, path) == ("DELETE", POD)
    assert body["preconditions"] == {"uid": "u1"}
    assert body["gracePeriodSeconds"] == 5


@pytest.mark.parametrize(
    ("refusal", "found"), [(MISSING, []), (TAKEN, [MISSING]), (TAKEN, [uid("u2")])], ids=["gone", "gone since", "next"]
)
async def test_a_pod_that_is_gone_or_has_a_namesake_counts_as_deleted_before(refusal: ApiError, found: Any) -> None:
    server = Scripted(DELETE=[refusal], GET=found)
    assert not await ApiClient(server).delete_pod("team", "job-w0", "u1")


async def test_a_conflict_over_the_very_pod_is_an_error() -> None:
    """So may an admission webhook answer; the pod is still there."""
    with pytest.raises(ApiError, match="taken"):
        await ApiClient(Scripted(DELETE=[TAKEN], GET=[uid("u1")])).delete_pod("team", "job-w0", "u1")


async def test_a_status_is_merged_into_the_very_job_and_no_other() -> None:
    server = Scripted()
    await ApiClient(server).write_status("team", "job", "u1", {"plan": None})
    ((method, path, body, _, kind),) = server.calls
    assert (method, path) == ("PATCH", f"{JOB}/status")
    assert body == {"metadata": {"uid": "u1"}, "status": {"plan": None}}
    assert kind == "application/merge-patch+json"


@pytest.mark.parametrize(("refusal", "found"), [(MISSING, []), (TAKEN, [MISSING]), (TAKEN, [uid("u2")])])
async def test_a_job_that_is_gone_or_has_a_namesake_gets_no_status(refusal: ApiError, found: Any) -> None:
    with pytest.raises(JobGone):
        await ApiClient(Scripted(PATCH=[refusal], GET=found)).write_status("team", "job", "u1", {})


async def test_a_conflict_over_the_very_job_is_for_the_caller_to_repeat() -> None:
    with pytest.raises(ApiError, match="taken"):
        await ApiClient(Scripted(PATCH=[TAKEN], GET=[uid("u1")])).write_status("team", "job", "u1", {})


async def test_what_is_there_already_or_gone_already_is_no_error() -> None:
    await ApiClient(Scripted(DELETE=[MISSING])).delete_disruption_budget("team", "job")
    await ApiClient(Scripted(DELETE=[MISSING])).delete_revision("team", "job-1")
    with pytest.raises(ApiError):
        await ApiClient(Scripted(DELETE=[TAKEN])).delete_revision("team", "job-1")


@pytest.mark.parametrize("kind", ["networkpolicies", "poddisruptionbudgets"])
async def test_what_is_about_all_workers_is_made_or_changed_back(kind: str) -> None:
    server, thing = Scripted(), {"metadata": {"namespace": "team", "name": "bamboo-u1"}}
    of = ApiClient(server)
    await (of.apply_network_policy(thing) if kind == "networkpolicies" else of.apply_disruption_budget(thing))
    ((method, path, body, query, how),) = server.calls
    assert (method, path.partition("/namespaces/")[2], body) == ("PATCH", f"team/{kind}/bamboo-u1", thing)
    assert (query["force"], how) == ("true", "application/apply-patch+yaml")


async def test_whether_something_is_there_needs_no_other_right_than_its_watch() -> None:
    server = Scripted(GET=[uid("u1"), uid(None), MISSING])
    assert [await ApiClient(server).uid_of(JOB) for _ in range(3)] == ["u1", None, None]
    collection, _, name = JOB.rpartition("/")
    assert {(method, path, str(query)) for method, path, _, query, _ in server.calls} == {
        ("GET", collection, str({"fieldSelector": f"metadata.name={name}"}))
    }


async def test_what_may_be_missing_is_none() -> None:
    assert await ApiClient(Scripted(GET=[MISSING])).read_lease("team", "x") is None
    with pytest.raises(ApiError):
        await ApiClient(Scripted(GET=[ApiError(403, "Forbidden", "no")])).read_lease("team", "x")


async def test_a_pod_is_tried_strictly_and_is_not_made() -> None:
    server = Scripted()
    await ApiClient(server).try_pod({"metadata": {"namespace": "team"}})
    ((_, _, _, query, _),) = server.calls
    assert query == {"dryRun": "All", "fieldValidation": "Strict"}


async def test_a_job_is_deleted_with_all_that_it_owns() -> None:
    server = Scripted()
    await ApiClient(server).delete_job("team", "job", "u1")
    ((method, path, body, *_),) = server.calls
    assert (method, path) == ("DELETE", JOB)
    assert body["propagationPolicy"] == "Background"
    assert body["preconditions"] == {"uid": "u1"}


@pytest.mark.parametrize(
    ("status", "reason", "refused"),
    [
        (403, "Forbidden", True),
        (422, "Invalid", True),
        (400, "BadRequest", True),
        (500, "InternalError", True),  # a webhook that fails
        (500, "Timeout", False),
        (409, "AlreadyExists", False),
        (429, "TooManyRequests", False),
    ],
)
def test_what_passes_by_itself_is_no_refusal_of_a_pod(status: int, reason: str, refused: bool) -> None:
    found = PodRefused.of(ApiError(status, reason, "said"))
    assert (found is not None) == refused
    assert found is None or (found.status, found.message) == (status, "said")
