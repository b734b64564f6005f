"""What the command line asks of the API server: plain objects over HTTPS, each call with a time limit."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from bamboo.kube.credentials import Credentials
from bamboo.kube.errors import ApiError, ClusterUnreachable, RemoteError
from bamboo.kube.kubeconfig import Access
from bamboo.names import GROUP, LABEL_JOB_NAME, PLURAL, VERSION

Object = dict[str, Any]

TIMEOUT_SECONDS = 30.0
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 3600.0  # of a worker whose log is followed
BUSY_TRIES, BUSY_SECONDS, MOST_BUSY_SECONDS = 6, 0.5, 5.0  # a pause if the server names none, and at most
PAGE = 500  # objects in one answer to a list
LARGEST_LINE = 1 << 20  # of a log; a longer one is cut into several
MANAGER = "bamboo"  # of the fields that are applied
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class KubeApi:
    """Every method may raise a RemoteError whose text is meant for the user."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._credentials = Credentials(access)
        self._session: aiohttp.ClientSession | None = None
        self._left: list[aiohttp.ClientSession] = []

    async def __aenter__(self) -> Self:
        await self._credentials.renew()
        self._session = self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in [*self._left, *([self._session] if self._session else [])]:
            await session.close()

    def _connect(self) -> aiohttp.ClientSession:
        limits = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS, connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(ssl=self._credentials.tls(), limit=100)
        return aiohttp.ClientSession(connector=connector, timeout=limits)

    # jobs

    async def job(self, namespace: str, name: str) -> Object:
        try:
            return await self.call("GET", jobs_path(namespace, name))
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def jobs(self, namespace: str | None) -> list[Object]:
        """Of all namespaces if None."""
        try:
            return await self.listed(jobs_path(namespace))
        except ApiError as error:
            raise await self._explained(error, namespace or "", "") from None

    async def apply_job(self, namespace: str, document: Object, *, force: bool, dry_run: bool = False) -> Object:
        """Server-side apply: makes it, or merges it into the one there is."""
        name = document["metadata"]["name"]
        query = {"fieldManager": MANAGER, "force": str(force).lower()} | ({"dryRun": "All"} if dry_run else {})
        try:
            return await self.call("PATCH", jobs_path(namespace, name), document, query, APPLY)
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def patch_job(self, namespace: str, name: str, body: Object) -> Object:
        try:
            return await self.call("PATCH", jobs_path(namespace, name), body, {"fieldManager": MANAGER}, MERGE)
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """That very job, and in the background all that it owns."""
        body = {
            "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }  # fmt: skip
        try:
            await self.call("DELETE", jobs_path(namespace, name), body)
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def _explained(self, error: ApiError, namespace: str, name: str) -> RemoteError:
        """The API server answers with the same 404 if the job, the namespace or the CRD is missing."""
        if error.status != 404:
            return error
        if str(error).startswith("namespaces "):
            return ApiError(404, "NoNamespace", f"there is no namespace {namespace}")
        try:
            await self.call("GET", f"/apis/{GROUP}/{VERSION}")
        except ApiError as missing:
            if missing.status == 404:
                return ApiError(404, "NoCrd", f"the cluster has no {PLURAL}.{GROUP}: Bamboo is not installed there")
        if not name:
            return error
        return ApiError(404, "NotFound", f"there is no job {name} in namespace {namespace}")

    # pods, nodes, events

    async def pods(self, namespace: str, job: str) -> list[Object]:
        return await self.listed(f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": f"{LABEL_JOB_NAME}={job}"})

    async def nodes(self, names: set[str]) -> dict[str, Object]:
        """Those that are there; none if the user may not look at nodes."""
        answers = await asyncio.gather(*(self._node(name) for name in sorted(names)))
        return {node["metadata"]["name"]: node for node in answers if node}

    async def _node(self, name: str) -> Object | None:
        try:
            return await self.call("GET", f"/api/v1/nodes/{name}")
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
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        await self.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", body)

    async def node(self, name: str) -> Object:
        return await self.call("GET", f"/api/v1/nodes/{name}")

    async def workers_on(self, node: str) -> list[Object]:
        """Pods of all jobs' workers on that node."""
        query = {"labelSelector": LABEL_JOB_NAME, "fieldSelector": f"spec.nodeName={node}"}
        return await self.listed("/api/v1/pods", query)

    async def set_taints(self, node: Object, taints: list[Object]) -> Object:
        """Unless the node has been changed since it was read, which is an ApiError of status 409."""
        version = {"resourceVersion": node["metadata"]["resourceVersion"]}
        body = {"metadata": version, "spec": {"taints": taints}}
        return await self.call("PATCH", f"/api/v1/nodes/{node['metadata']['name']}", body, kind=MERGE)

    async def token(self, namespace: str, account: str, audience: str, seconds: int) -> Object:
        """The status of a TokenRequest."""
        body = {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": seconds},
        }  # fmt: skip
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
        self, method: str, path: str, body: Object | None = None, query: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> Object:  # fmt: skip
        """Again for a while if the server has too much to do (429); so it also answers for a CRD that is new."""
        data = None if body is None else json.dumps(body).encode()
        for left in reversed(range(BUSY_TRIES)):
            async with self._request(method, path, query, data=data, kind=kind) as answer:
                found = await _json(answer)
                if answer.status < 400:
                    return found
                if answer.status != 429 or not left:
                    raise _refusal(answer, found)
                pause = _retry_after(answer)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> AsyncGenerator[str, None]:
        """Its lines, as they come."""
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        async with self._request("GET", path, query, limits=limits) as answer:
            if answer.status >= 400:
                raise _refusal(answer, await _json(answer))
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > LARGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def socket(self, path: str, query: Mapping[str, str], protocol: str) -> AsyncIterator[Any]:
        """A WebSocket through the API server."""
        await self._renewed()
        assert self._session is not None
        try:
            async with self._session.ws_connect(
                self._url(path), params=query, protocols=[protocol], headers=self._headers(),
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0), max_msg_size=0, **self._options(),
            ) as socket:  # fmt: skip
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, "", f"the API server refuses {path}: {error.status} {error.message}") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, query: Mapping[str, str] | None, *, data: bytes | None = None,
        kind: str = "application/json", limits: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:  # fmt: skip
        """Once more with new credentials if a plugin's are refused."""
        await self._renewed()
        for last in (False, True):
            assert self._session is not None
            headers = self._headers(kind if data is not None else None)
            options: dict[str, Any] = {"timeout": limits, **self._options()} if limits else self._options()
            try:
                async with self._session.request(
                    method, self._url(path), params=query, data=data, headers=headers, **options
                ) as answer:
                    if answer.status == 401 and not last and await self._renewed(refused=True):
                        continue
                    yield answer
                    return
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise self._unreachable(error) from None

    async def _renewed(self, *, refused: bool = False) -> bool:
        before = self._credentials.certificate
        renewed = await self._credentials.renew(refused=refused)
        if self._session is not None and self._credentials.certificate != before:
            self._left.append(self._session)  # not closed, a log may be streamed over it
            self._session = self._connect()
        return renewed

    def _headers(self, kind: str | None = None) -> list[tuple[str, str]]:
        headers = [("Accept", "application/json"), ("User-Agent", "bamboo-cli"), *self._credentials.headers()]
        return [*headers, ("Content-Type", kind)] if kind else headers

    def _options(self) -> dict[str, Any]:
        server = self.access.server
        return {"proxy": server.proxy, "server_hostname": server.tls_name}

    def _url(self, path: str) -> str:
        return self.access.server.url + quote(path)

    def _unreachable(self, error: BaseException) -> ClusterUnreachable:
        where = f"the cluster at {self.access.server.url} (context {self.access.context})"
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return ClusterUnreachable(f"{where} is not trusted: {_certificate_problem(error)}")
        if isinstance(error, aiohttp.ServerTimeoutError | TimeoutError):
            return ClusterUnreachable(f"{where} does not answer in time")
        return ClusterUnreachable(f"{where} cannot be reached: {_short(error)}")


def jobs_path(namespace: str | None, name: str | None = None) -> str:
    prefix = f"/apis/{GROUP}/{VERSION}" + (f"/namespaces/{namespace}" if namespace else "")
    return f"{prefix}/{PLURAL}" + (f"/{name}" if name else "")


async def _json(answer: aiohttp.ClientResponse) -> Object:
    """What came, if it is an object; a proxy in between may answer anything."""
    try:
        found = json.loads(await answer.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(answer: aiohttp.ClientResponse, found: Object) -> ApiError:
    """Kubernetes' own sentence names verb, resource and user, and every field that is wrong."""
    message, reason = str(found.get("message") or ""), str(found.get("reason") or answer.reason or "")
    if answer.status == 401:
        message = "the cluster does not accept the credentials of the kubeconfig; log in again"
    if answer.status == 403:
        message = f"permission denied: {message or 'the API server forbids it'}"
    return ApiError(answer.status, reason, " ".join(message.split()))


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    """In how many seconds the server wants to be asked again; an HTTP date, which is allowed, too, names none."""
    named = answer.headers.get("Retry-After", "")
    return min(float(named), MOST_BUSY_SECONDS) if re.fullmatch(r"\d{1,9}", named) else BUSY_SECONDS


def _certificate_problem(error: aiohttp.ClientConnectorCertificateError) -> str:
    found = error.certificate_error
    return str(getattr(found, "verify_message", "") or found)


def _short(error: BaseException) -> str:
    inner = getattr(error, "os_error", None) or error
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)
