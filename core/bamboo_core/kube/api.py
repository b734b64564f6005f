"""What the command line asks of the API server, in its words: plain objects, and sentences for what is refused."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Self

import aiohttp

from bamboo_core.kube.connection import JSON, Connection, ConnectionOptions
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, RemoteError
from bamboo_core.kube.kubeconfig import Access
from bamboo_core.kube.request_parts import (
    APPLY,
    MERGE,
    Object,
    delete_options,
    job_path,
    jobs_path,
    node_path,
    pod_path,
    pods_path,
)
from bamboo_core.names import GROUP, LABEL_JOB_NAME, PLURAL, VERSION

OPTIONS = ConnectionOptions(agent="bamboo-cli", total_seconds=30.0, connect_seconds=10.0, connections=100, tries=6)
SILENCE_SECONDS = 3600.0  # of a worker whose log is followed
PAGE = 500  # objects in one answer to a list
LARGEST_LINE = 1 << 20  # of a log; a longer one is cut into several
MANAGER = "bamboo"  # of the fields that are applied


class KubeApi:
    """Every method may raise a RemoteError whose text is meant for the user."""

    def __init__(self, access: Access) -> None:
        self._connection = Connection(access, OPTIONS)

    @property
    def access(self) -> Access:
        return self._connection.access

    async def __aenter__(self) -> Self:
        await self._connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close()

    # jobs

    async def job(self, namespace: str, name: str) -> Object:
        try:
            return await self.call("GET", job_path(namespace, name))
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def jobs(self, namespace: str | None) -> list[Object]:
        """The BambooJobs of the namespace; of all namespaces if it is None."""
        try:
            return await self.listed(jobs_path(namespace))
        except ApiError as error:
            raise await self._explained(error, namespace or "", "") from None

    async def apply_job(self, namespace: str, document: Object, *, force: bool, dry_run: bool = False) -> Object:
        """Server-side apply: makes it, or merges it into the one there is."""
        name = document["metadata"]["name"]
        query = {"fieldManager": MANAGER, "force": str(force).lower()} | ({"dryRun": "All"} if dry_run else {})
        try:
            return await self.call("PATCH", job_path(namespace, name), document, query, APPLY)
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def patch_job(self, namespace: str, name: str, body: Object) -> Object:
        try:
            return await self.call("PATCH", job_path(namespace, name), body, {"fieldManager": MANAGER}, MERGE)
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """That very job, and in the background all that it owns."""
        try:
            await self.call("DELETE", job_path(namespace, name), delete_options(uid, propagation="Background"))
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def _explained(self, error: ApiError, namespace: str, name: str) -> RemoteError:
        """The API server answers with the same 404 if the job, the namespace or the CRD is missing."""
        if error.status != 404:
            return error
        if str(error).startswith("namespaces "):
            return ApiError(404, "NoNamespace", f"there is no namespace {namespace}")
        if not await self._serves_jobs():
            return ApiError(404, "NoCrd", f"the cluster has no {PLURAL}.{GROUP}: Bamboo is not installed there")
        if not name:
            return error
        return ApiError(404, "NotFound", f"there is no job {name} in namespace {namespace}")

    async def _serves_jobs(self) -> bool:
        """Return whether the CRD, the only one of its group, is there; True if the API server does not answer that."""
        try:
            await self.call("GET", f"/apis/{GROUP}/{VERSION}")
        except ApiError as error:
            return error.status != 404
        return True

    # pods, nodes, events

    async def pods(self, namespace: str, job: str) -> list[Object]:
        return await self.listed(pods_path(namespace), {"labelSelector": f"{LABEL_JOB_NAME}={job}"})

    async def nodes(self, names: set[str]) -> dict[str, Object]:
        """Those that are there; none if the user may not look at nodes."""
        answers = await asyncio.gather(*(self._node(name) for name in sorted(names)))
        return {node["metadata"]["name"]: node for node in answers if node}

    async def _node(self, name: str) -> Object | None:
        try:
            return await self.call("GET", node_path(name))
        except ApiError as error:
            if error.status in (403, 404):
                return None
            raise

    async def events(self, namespace: str, kind: str, name: str | None = None) -> list[Object]:
        """Events about objects of that kind."""
        selected = f"involvedObject.kind={kind}" + (f",involvedObject.name={name}" if name else "")
        return await self.listed(f"/api/v1/namespaces/{namespace}/events", {"fieldSelector": selected})

    async def delete_pod(self, namespace: str, name: str, uid: str, grace_seconds: int | None = None) -> None:
        """That very pod. grace_seconds: the pod's own if None; at 0 its object is gone at once."""
        await self.call("DELETE", pod_path(namespace, name), delete_options(uid, grace_seconds))

    async def token(self, namespace: str, account: str, audience: str, seconds: int) -> Object:
        """The status of a TokenRequest."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": seconds},
        }
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        found: Object = (await self.call("POST", path, body)).get("status") or {}
        return found

    async def minor_version(self) -> int:
        """The 36 of Kubernetes 1.36."""
        found = str((await self.call("GET", "/version")).get("minor"))
        digits = re.match(r"\d{1,9}", found)  # some clouds write 36+
        if digits is None:
            raise RemoteError(f"the API server says its minor version is {found!r}")
        return int(digits[0])

    # the calls themselves

    async def listed(self, path: str, query: Mapping[str, str] | None = None) -> list[Object]:
        """All of them, page by page."""
        items: list[Object] = []
        asked = {**(query or {}), "limit": str(PAGE)}
        while True:
            found = await self.call("GET", path, query=asked)
            items += found.get("items") or ()
            following = (found.get("metadata") or {}).get("continue")
            if not following:
                return items
            asked["continue"] = following

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = JSON,
    ) -> Object:
        """Again for a while if the server has too much to do (429); so it also answers for a CRD that is new."""
        with self._refused(), self._unanswered():
            return await self._connection.call(method, path, body, query, kind)

    async def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> AsyncGenerator[str, None]:
        """Its lines, as they come."""
        path = f"{pod_path(namespace, pod)}/log"
        with self._refused(), self._unanswered():
            async with self._connection.stream(path, query, SILENCE_SECONDS) as content:
                rest = b""
                async for chunk in content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    if len(rest) > LARGEST_LINE:
                        lines, rest = [*lines, rest], b""
                    for line in lines:
                        yield line.decode(errors="replace")
                if rest:
                    yield rest.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def socket(
        self, path: str, query: Mapping[str, str], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket through the API server."""
        with self._unanswered():
            async with self._connection.socket(path, query, protocol) as socket:
                yield socket

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        """What the API server refuses, as one sentence for the user."""
        try:
            yield
        except ApiError as error:
            raise _worded(error) from None

    @contextlib.contextmanager
    def _unanswered(self) -> Iterator[None]:
        """What keeps the API server from answering, as one sentence for the user."""
        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(error, self._connection.access) from None


def _worded(error: ApiError) -> ApiError:
    """Kubernetes' own sentence names verb, resource and user, and every field that is wrong."""
    message = error.message
    if error.status == 401:
        message = "the cluster does not accept the credentials of the kubeconfig; log in again"
    if error.status == 403:
        message = f"permission denied: {message or 'the API server forbids it'}"
    return ApiError(error.status, error.reason, " ".join(message.split()))


def _unreachable(error: BaseException, access: Access) -> ClusterUnreachable:
    where = f"the cluster at {access.server.url} (context {access.context})"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return ClusterUnreachable(f"{where} is not trusted: {_certificate_problem(error)}")
    if isinstance(error, aiohttp.ServerTimeoutError | TimeoutError):
        return ClusterUnreachable(f"{where} does not answer in time")
    return ClusterUnreachable(f"{where} cannot be reached: {_short(error)}")


def _certificate_problem(error: aiohttp.ClientConnectorCertificateError) -> str:
    found = error.certificate_error
    return str(getattr(found, "verify_message", "") or found)


def _short(error: BaseException) -> str:
    inner = getattr(error, "os_error", None) or error
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)
