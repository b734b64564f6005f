"""What the operator asks of the API server: a few calls, each with a time limit, on plain objects.

Not the official client's typed calls (37.0.2): they take twice the CPU time (measured at b11a1fe3), and refuse
a pod by themselves if it has a field that is newer than they are, or a quantity that is written as a number.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from bamboo_core.complaints import said_by
from bamboo_core.kube.connection import JSON, Connection, ConnectionOptions
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.kube.kubeconfig import Access
from bamboo_core.kube.request_parts import (
    APPLY,
    MERGE,
    Object,
    delete_options,
    job_path,
    jobs_path,
    pod_path,
    pods_path,
)
from bamboo_operator.kube.api_calls import ApiCallCounts

TIMEOUT_SECONDS = 10.0
CONNECT_SECONDS = 3.0
API_CONNECTIONS = 32
POD_EVENTS = 100  # that are read of one; the kubelet counts what happens again, and begins 25 at most in a row
APPLIED = {"fieldManager": "bamboo-operator", "force": "true"}
NODES = "/api/v1/nodes"


class PodRefused(ApiError):
    """The API server does not take a pod as it is: a quota, an admission policy, a ServiceAccount that is missing."""

    @classmethod
    def of(cls, error: ApiError) -> "PodRefused | None":
        """None if the error passes by itself, or is of something else. A webhook that fails gives 500."""
        if error.status in (400, 403, 422) or (error.status == 500 and error.reason == "InternalError"):
            return cls(error.status, error.reason, error.message)
        return None


API_ERRORS = (RemoteError, aiohttp.ClientError, OSError, TimeoutError)  # RemoteError: an ApiError, or no credentials


def described(error: BaseException) -> str:
    """What is in API_ERRORS, for the log."""
    if isinstance(error, ApiError):
        return f"{error} ({error.reason}, {error.status})"
    return said_by(error)


class JobGone(Exception):
    """The BambooJob is deleted, or another one has its name."""


def connect(access: Access, calls: ApiCallCounts, connections: int) -> Connection:
    """calls: counts those made. connections: open at the same time, at most. A busy API server is not asked again by
    itself: the one who asked does so, after a pause of its own."""
    options = ConnectionOptions(
        agent="bamboo-operator", total_seconds=TIMEOUT_SECONDS, connect_seconds=CONNECT_SECONDS, connections=connections
    )
    return Connection(access, options, calls.ended)


class Calls(Protocol):
    """The one call of a connection to an API server, for who needs no more of it."""

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = JSON,
    ) -> Object: ...


class ApiClient:
    """Every method may raise what is in API_ERRORS. connection: closed by who opened it."""

    def __init__(self, connection: Calls) -> None:
        self._call = connection.call

    async def create_pod(self, pod: Object) -> Object:
        return await self._call("POST", _pods(pod), pod)

    async def try_pod(self, pod: Object) -> None:
        """Raises what the API server has against it, fields included that it does not know and would leave out."""
        await self._call("POST", _pods(pod), pod, {"dryRun": "All", "fieldValidation": "Strict"})

    async def read_pod(self, namespace: str, name: str) -> Object:
        return await self._call("GET", pod_path(namespace, name))

    async def uid_of(self, path: str) -> str | None:
        """The UID of the object at that path; None if there is none. It asks for a list of that object alone: to list
        is a right that the watches need, and with it none to get is.
        """
        collection, _, name = path.rpartition("/")
        try:
            found = await self._call("GET", collection, query={"fieldSelector": f"metadata.name={name}"})
        except ApiError as error:
            if error.status == 404:  # there is no such kind
                return None
            raise
        uids = (str((item.get("metadata") or {}).get("uid")) for item in found.get("items") or ())
        return next(uids, None)

    async def delete_pod(self, namespace: str, name: str, uid: str, grace_seconds: int | None = None) -> bool:
        """That very pod. False if it was gone already."""
        try:
            await self._call("DELETE", pod_path(namespace, name), delete_options(uid, grace_seconds))
        except ApiError as error:
            if error.status == 409 and await self.uid_of(pod_path(namespace, name)) == uid:
                raise  # so may an admission webhook answer
            if error.status not in (404, 409):
                raise
            return False
        return True

    async def write_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> None:
        """Merged into that very BambooJob's status; a field that is None is removed. Raises JobGone if it is gone."""
        path = f"{job_path(namespace, name)}/status"
        body = {"metadata": {"uid": uid}, "status": dict(status)}
        try:
            await self._call("PATCH", path, body, kind=MERGE)
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and await self.uid_of(job_path(namespace, name)) != uid):
                raise JobGone(str(error)) from None
            raise

    async def apply_network_policy(self, policy: Object) -> None:
        """Makes it, or makes it what it is to be."""
        namespace = policy["metadata"]["namespace"]
        await self._apply(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", policy)

    async def apply_disruption_budget(self, budget: Object) -> None:
        """Makes it, or makes it what it is to be."""
        await self._apply(_budgets(budget["metadata"]["namespace"]), budget)

    async def delete_disruption_budget(self, namespace: str, name: str) -> None:
        """Unless there is none."""
        await self._delete(f"{_budgets(namespace)}/{name}")

    async def list_revisions(self, namespace: str, selector: str) -> list[Object]:
        """ControllerRevisions with these labels."""
        return await self._listed(_revisions(namespace), {"labelSelector": selector})

    async def create_revision(self, revision: Object) -> None:
        await self._call("POST", _revisions(revision["metadata"]["namespace"]), revision)

    async def delete_revision(self, namespace: str, name: str) -> None:
        """Unless it is gone."""
        await self._delete(f"{_revisions(namespace)}/{name}")

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """That very job, and in the background all that it owns."""
        await self._call("DELETE", job_path(namespace, name), delete_options(uid, propagation="Background"))

    async def review_token(self, token: str, audiences: Sequence[str]) -> Object:
        """The status of a TokenReview."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": list(audiences)},
        }
        review = await self._call("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body)
        status = review.get("status")
        return status if isinstance(status, dict) else {}

    async def review_access(self, user: Object, attributes: Mapping[str, str]) -> Object:
        """The status of a SubjectAccessReview: whether that user, as a TokenReview names it, may do that."""
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user.get("username") or "",
                "uid": user.get("uid") or "",
                "groups": user.get("groups") or [],
                "extra": user.get("extra") or {},
                "resourceAttributes": dict(attributes),
            },
        }
        review = await self._call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        status = review.get("status")
        return status if isinstance(status, dict) else {}

    async def serves_jobs(self, namespace: str | None) -> bool:
        """Is there a CRD of BambooJobs? namespace: one in which they may be listed; None: in all."""
        try:
            await self._call("GET", jobs_path(namespace), query={"limit": "1"})
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def read_lease(self, namespace: str, name: str) -> Object | None:
        """None if there is no such Lease."""
        return await self._find(f"{_leases(namespace)}/{name}")

    async def create_lease(self, lease: Object) -> Object:
        return await self._call("POST", _leases(lease["metadata"]["namespace"]), lease)

    async def replace_lease(self, lease: Object) -> Object:
        """As it was read, but for what is changed. Raises ApiError with status 409 if it is no longer what was read."""
        metadata = lease["metadata"]
        return await self._call("PUT", f"{_leases(metadata['namespace'])}/{metadata['name']}", lease)

    async def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        """value: None removes the label."""
        body = {"metadata": {"labels": {label: value}}}
        await self._call("PATCH", pod_path(namespace, name), body, kind=MERGE)

    async def pod_events(self, namespace: str, uid: str) -> list[Object]:
        """What is told of that very pod."""
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(POD_EVENTS)}
        return await self._listed(_events(namespace), query)

    async def create_event(self, event: Object) -> Object:
        return await self._call("POST", _events(event["metadata"]["namespace"]), event)

    async def count_event(self, namespace: str, name: str, count: int, last: str) -> bool:
        """It has happened so many times by now, the last time then. False if there is no such event any more."""
        body = {"count": count, "lastTimestamp": last}
        try:
            await self._call("PATCH", f"{_events(namespace)}/{name}", body, kind=MERGE)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _listed(self, collection: str, query: Mapping[str, str] | None = None) -> list[Object]:
        items = (await self._call("GET", collection, query=query)).get("items")
        return items if isinstance(items, list) else []

    async def _apply(self, collection: str, thing: Object) -> None:
        """What others have changed of the fields that it has is changed back."""
        await self._call("PATCH", f"{collection}/{thing['metadata']['name']}", thing, APPLIED, APPLY)

    async def _delete(self, path: str) -> None:
        """The object at that path, unless it is gone."""
        try:
            await self._call("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _find(self, path: str) -> Object | None:
        """The object at that path; None if there is none."""
        try:
            return await self._call("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise


def _pods(pod: Object) -> str:
    return pods_path(pod["metadata"]["namespace"])


def _events(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/events"


def _budgets(namespace: str) -> str:
    return f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"


def _revisions(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"


def _leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
