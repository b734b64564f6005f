"""What the operator asks of the API server: a few calls, each with a time limit, on plain objects."""

import base64
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import kopf

from bamboo.names import GROUP, PLURAL, VERSION
from bamboo_operator.counts import Calls

TIMEOUT_SECONDS = 10.0
CONNECT_SECONDS = 3.0
CONNECTIONS = 32
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where a pod has its ServiceAccount's files
TOKEN_FILE, AUTHORITY_FILE, NAMESPACE_FILE = ACCOUNT / "token", ACCOUNT / "ca.crt", ACCOUNT / "namespace"
FIELD_MANAGER = "bamboo-operator"
TOKEN_SECONDS = 60.0  # a ServiceAccount's token is read again after that long: it is rotated
Object = dict[str, Any]


class ApiError(Exception):
    """The API server refused. status: the HTTP code; reason: a CamelCase word such as AlreadyExists."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{message} ({reason}, {status})")
        self.status, self.reason, self.message = status, reason, message


class PodRefused(ApiError):
    """The API server does not take a pod as it is: a quota, an admission policy, a ServiceAccount that is missing."""

    @classmethod
    def of(cls, error: ApiError) -> "PodRefused | None":
        """None if the error passes by itself, or is of something else. NB: a webhook that fails gives 500."""
        if error.status in (400, 403, 422) or (error.status == 500 and error.reason == "InternalError"):
            return cls(error.status, error.reason, error.message)
        return None


API_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


def credentials(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo:
    """The pod's ServiceAccount in a cluster, else KUBECONFIG. Raises kopf.LoginError if there is neither."""
    inside = kopf.login_with_service_account(settings=settings)
    if inside is not None:
        return replace(inside, server=_server_from_within() or inside.server)
    info = kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise kopf.LoginError("no cluster: neither a ServiceAccount nor a kubeconfig (KUBECONFIG) is there")
    return info


def _server_from_within() -> str | None:
    """The API server as a kubelet tells its pods: it is reached also while the cluster's DNS is away."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class JobGone(Exception):
    """The BambooJob is deleted, or another one has its name."""


class Api:
    """Every method may raise what is in API_ERRORS. connections: open at the same time, at most."""

    def __init__(self, info: kopf.ConnectionInfo, connections: int = CONNECTIONS, calls: Calls | None = None) -> None:
        self._server, self._info = info.server.rstrip("/"), info
        self._token, self._token_read = info.token, time.monotonic()
        auth = aiohttp.BasicAuth(info.username, info.password or "") if info.username else None
        connector = aiohttp.TCPConnector(ssl=_tls(info), limit=connections)
        limits = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS, connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector, timeout=limits, auth=auth)
        self.calls = calls or Calls()

    async def close(self) -> None:
        await self._session.close()

    async def create_pod(self, pod: Object) -> Object:
        return await self._call("POST", _pods(pod), pod)

    async def try_pod(self, pod: Object) -> None:
        """Raises what the API server has against it, fields included that it does not know and would leave out."""
        await self._call("POST", _pods(pod), pod, {"dryRun": "All", "fieldValidation": "Strict"})

    async def read_pod(self, namespace: str, name: str) -> Object:
        return await self._call("GET", pod_place(namespace, name))

    async def uid_of(self, place: str) -> str | None:
        """Of the object at that path; None if there is none."""
        found = await self._find(place)
        return None if found is None else str((found.get("metadata") or {}).get("uid"))

    async def delete_pod(self, namespace: str, name: str, uid: str, grace_seconds: int | None = None) -> bool:
        """That very pod. False if it was gone already."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            await self._call("DELETE", pod_place(namespace, name), body)
        except ApiError as error:
            if error.status == 409 and await self.uid_of(pod_place(namespace, name)) == uid:
                raise  # NB: so may an admission answer
            if error.status not in (404, 409):
                raise
            return False
        return True

    async def write_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> None:
        """Merged into that very BambooJob's status; a field that is None is removed. Raises JobGone if it is gone."""
        place = f"{job_place(namespace, name)}/status"
        body = {"metadata": {"uid": uid}, "status": dict(status)}
        try:
            await self._call("PATCH", place, body, kind="application/merge-patch+json")
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and await self.uid_of(job_place(namespace, name)) != uid):
                raise JobGone(str(error)) from None
            raise

    async def create_network_policy(self, policy: Object) -> None:
        """Unless there is one of that name."""
        place = f"/apis/networking.k8s.io/v1/namespaces/{policy['metadata']['namespace']}/networkpolicies"
        try:
            await self._call("POST", place, policy)
        except ApiError as error:
            if error.status != 409:
                raise

    async def apply_disruption_budget(self, budget: Object) -> None:
        """Makes it, or makes it what it is to be."""
        metadata = budget["metadata"]
        place, kind = f"{_budgets(metadata['namespace'])}/{metadata['name']}", "application/apply-patch+yaml"
        await self._call("PATCH", place, budget, {"fieldManager": FIELD_MANAGER, "force": "true"}, kind)

    async def delete_disruption_budget(self, namespace: str, name: str) -> None:
        """Unless there is none."""
        await self._delete(f"{_budgets(namespace)}/{name}")

    async def list_revisions(self, namespace: str, selector: str) -> list[Object]:
        """ControllerRevisions with these labels."""
        found = await self._call("GET", _revisions(namespace), query={"labelSelector": selector})
        items = found.get("items")
        return items if isinstance(items, list) else []

    async def create_revision(self, revision: Object) -> None:
        await self._call("POST", _revisions(revision["metadata"]["namespace"]), revision)

    async def delete_revision(self, namespace: str, name: str) -> None:
        """Unless it is gone."""
        await self._delete(f"{_revisions(namespace)}/{name}")

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """That very job, and in the background all that it owns."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        await self._call("DELETE", job_place(namespace, name), body)

    async def review_token(self, token: str, audience: str) -> Object:
        """The status of a TokenReview."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
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
        await self._call("PATCH", pod_place(namespace, name), body, kind="application/merge-patch+json")

    async def create_event(self, event: Object) -> None:
        await self._call("POST", f"/api/v1/namespaces/{event['metadata']['namespace']}/events", event)

    async def _delete(self, place: str) -> None:
        """The object at that path, unless it is gone."""
        try:
            await self._call("DELETE", place)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _find(self, place: str) -> Object | None:
        """The object at that path; None if there is none."""
        try:
            return await self._call("GET", place)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _call(
        self,
        method: str,
        place: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> Object:
        headers = {"Accept": "application/json", "User-Agent": "bamboo-operator"}
        if token := self._fresh_token():
            headers["Authorization"] = f"{self._info.scheme or 'Bearer'} {token}"
        if body is not None:
            headers["Content-Type"] = kind
        data = None if body is None else aiohttp.JsonPayload(body, content_type=kind)
        begun, code = time.monotonic(), "error"
        try:
            async with self._session.request(
                method, self._server + place, data=data, params=query, headers=headers
            ) as answer:
                found = await _object(answer)
                code = str(answer.status)
        finally:
            self.calls.ended(method, place, code, time.monotonic() - begun)
        if not isinstance(found, dict):
            found = {}
        if answer.status >= 400:
            raise ApiError(answer.status, str(found.get("reason")), str(found.get("message") or answer.reason))
        return found

    def _fresh_token(self) -> str | None:
        now = time.monotonic()
        if now - self._token_read > TOKEN_SECONDS and self._info.certificate_path is None and TOKEN_FILE.exists():
            self._token, self._token_read = TOKEN_FILE.read_text().strip(), now
        return self._token


def job_place(namespace: str, name: str) -> str:
    """The path of a BambooJob."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"


def pod_place(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def node_place(name: str) -> str:
    return f"/api/v1/nodes/{name}"


def _pods(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"


def _budgets(namespace: str) -> str:
    return f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"


def _revisions(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"


def _leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


async def _object(answer: aiohttp.ClientResponse) -> Any:
    """Proxies, and an API server with too much to do, answer in plain text."""
    try:
        return await answer.json(content_type=None)
    except ValueError:
        if answer.status >= 400:
            return None
        raise ApiError(answer.status, "NotJson", "an answer that is not JSON") from None


def _tls(info: kopf.ConnectionInfo) -> ssl.SSLContext | bool:
    """For the server's and our certificates, given as files or in base64."""
    if not info.server.startswith("https:"):
        return False
    authority = _text(info.ca_data)
    context = ssl.create_default_context(cafile=_path(info.ca_path), cadata=authority)
    if info.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if info.certificate_path and info.private_key_path:
        context.load_cert_chain(str(info.certificate_path), str(info.private_key_path))
    elif info.certificate_data and info.private_key_data:
        with tempfile.TemporaryDirectory(prefix="bamboo-operator-") as folder:  # ssl takes only files
            for name, data in (("cert", info.certificate_data), ("key", info.private_key_data)):
                file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(file, "w") as out:
                    out.write(_text(data) or "")
            context.load_cert_chain(f"{folder}/cert", f"{folder}/key")
    return context


def _path(path: Any) -> str | None:
    return None if path is None else str(path)


def _text(data: str | bytes | None) -> str | None:
    """PEM, which may come in base64."""
    if data is None:
        return None
    raw = data.encode() if isinstance(data, str) else data
    return (raw if raw.lstrip().startswith(b"-----") else base64.b64decode(raw)).decode()
