"""The Kubernetes client of the command line and the operator: the official asyncio client, with objects as dicts.

Its typed calls reject fields that they do not know, so all calls here use its generic one, with a time limit. Every
failure is a RemoteError in one sentence (ApiError: the server refuses; ClusterUnreachable: it does not answer;
ConfigError: the kubeconfig is wrong), or JobGone. This module is slow to import.
"""

import asyncio
import contextlib
import copy
import json
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger
from kubernetes.aio.stream import WsApiClient

from bamboo_core.complaints import said_by
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, ConfigError, JobGone, RemoteError
from bamboo_core.names import GROUP, LABEL_JOB_NAME, PLURAL, VERSION

Object = dict[str, Any]
Ended = Callable[[str, str, str, float], None]  # verb, path, code ("error" without an answer), seconds

JSON, YAML = "application/json", "application/yaml"
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in every pod that may call the API server
LOCAL = ("localhost", "127.0.0.1", "::1")  # hosts reached without a proxy
LOGIN_SECONDS = 300.0  # for a plugin, which may send the user to a browser
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 3600.0  # of a worker whose log is followed
BUSY_SECONDS, MOST_BUSY_SECONDS = 0.5, 5.0  # the pause after a 429 without Retry-After, and the longest pause
METADATA = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PAGE = 500  # objects in one answer to a list
SMALL_PAGE = 100  # the same where parsing an answer must not block the event loop for long
POD_EVENTS = 100  # the most events read of one pod; the kubelet makes at most 25 at once, and counts repetitions
LARGEST_LINE = 1 << 20  # bytes of a line of a log; a longer one is cut into several
MANAGER = "bamboo"  # the field manager of manifests that users apply
APPLIED = {"fieldManager": "bamboo-operator", "force": "true"}


# Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """An API server and credentials for it. namespace: the default of commands."""

    context: str
    namespace: str
    configuration: Configuration


async def log_in(path: str | None = None, context: str | None = None) -> Access:
    """Log in to a cluster with the kubeconfig at `path`, else KUBECONFIG, else ~/.kube/config. If the file is missing,
    and `path` and `context` are None, use the pod's ServiceAccount. Raises ConfigError.
    """
    files = path or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)):
        return await _from_kubeconfig(files, context)
    if path:
        raise ConfigError(f"--kubeconfig {path}: no such file")
    if context:
        raise ConfigError(f"--context {context}: there is no kubeconfig ({files})")
    inside = in_cluster()
    if inside is None:
        raise ConfigError(f"no cluster: there is no kubeconfig ({files}); set KUBECONFIG")
    return inside


def in_cluster() -> Access | None:
    """Return access by the ServiceAccount of the pod that this process runs in; None outside of pods or without one."""
    configuration = new_configuration()
    try:
        load_incluster_config(configuration)
        namespace = (ACCOUNT / "namespace").read_text().strip()
    except (ConfigException, OSError):
        return None
    return Access(context="in-cluster", namespace=namespace, configuration=configuration)


async def _from_kubeconfig(files: str, context: str | None) -> Access:
    configuration = new_configuration()
    try:
        merged = KubeConfigMerger(files).config
        loader = KubeConfigLoader(merged, active_context=context, config_base_path=None)
        chosen, name = loader.current_context["context"], loader.current_context["name"]
        entry = merged["users"].get_with_name(chosen.get("user"), safe=True)
        user = (entry.value["user"] if entry else None) or {}
    except Exception as error:  # the library raises anything for an unexpected file
        flag = f"--context {context}: " if context else ""
        raise ConfigError(f"{flag}{files}: not a usable kubeconfig: {said_by(error)}") from None
    where = f"{files}: context {name}"
    if not user:
        raise ConfigError(f"{where} names no user with credentials")
    if "as" in user:
        raise ConfigError(f"{where}: impersonation (as) is not supported")
    with _logged() as messages:
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                await loader.load_and_set(configuration)
        except Exception as error:  # as above
            raise ConfigError(f"{where} cannot be used: {said_by(error)}") from None
    keys = configuration.api_key
    if not keys and not configuration.cert_file:  # the library would send anonymous requests
        plugin = (user.get("exec") or {}).get("command")
        source = f"the plugin {plugin}" if plugin else "its user"
        raise ConfigError(f"{where}: {source} gave no credentials{''.join(f'; {text}' for text in messages)}")
    if "BearerToken" in keys:
        keys["BearerToken"] = keys["BearerToken"].strip()  # a file's line end is not part of the token
    if hasattr(loader, "exec_plugin_expiry"):
        configuration.refresh_api_key_hook = _renewing(loader)
    configuration.proxy = configuration.proxy or _environment_proxy(configuration.host)
    configuration.client_session_kwargs["proxy"] = configuration.proxy  # for WebSockets, too
    return Access(context=name, namespace=chosen.get("namespace") or "default", configuration=configuration)


def new_configuration() -> Configuration:
    """Return a configuration of the official client with the settings that all calls here need, but no server."""
    made = Configuration()
    made.disable_strict_ssl_verification = True  # Python 3.13 refuses the authorities of older EKS clusters
    made.client_session_kwargs = {"trust_env": False}  # else each call takes three times the CPU time
    return made


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the warnings of the library's kubeconfig reader, such as why a plugin failed, instead of logging them."""
    messages: list[str] = []
    logger = logging.getLogger("kubernetes.aio.config.kube_config")

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            messages.append(" ".join(record.getMessage().split()))
        return False

    logger.addFilter(keep)
    try:
        yield messages
    finally:
        logger.removeFilter(keep)


def _renewing(loader: KubeConfigLoader) -> Callable[[Configuration], Any]:
    """Return a hook that runs the credential plugin again, once for all callers, before its token expires."""
    lock = asyncio.Lock()

    async def renew(configuration: Configuration) -> None:
        async with lock:
            await loader.load_from_exec_plugin()
        configuration.api_key["BearerToken"] = loader.token

    return renew


def _environment_proxy(url: str) -> str | None:
    """Return the proxy for a server, from HTTPS_PROXY, HTTP_PROXY and NO_PROXY; None for a direct connection."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return None if host in LOCAL or proxy_bypass(host) else getproxies().get(parts.scheme)


# Calls


class Connection:
    """The connections to one API server, shared by many tasks. All methods may raise a RemoteError.

    agent: the calling program. seconds: the time limit of each try of a call. tries: the most tries of a call while the
    server answers 429, because it is busy or does not serve a new CRD yet. connections: the most open at once. ended:
    called after every try of `call`.
    """

    def __init__(
        self,
        access: Access,
        *,
        agent: str = "bamboo-cli",
        seconds: float = 30.0,
        tries: int = 6,
        connections: int = 100,
        ended: Ended | None = None,
    ) -> None:
        self.access = access
        self._configuration = copy.copy(access.configuration)  # shares the token that is renewed
        self._configuration.connection_pool_maxsize = connections
        try:
            self._client = ApiClient(self._configuration)
        except (OSError, ValueError) as error:
            raise ConfigError(f"context {access.context}: its certificates cannot be used: {error}") from None
        self._client.user_agent = agent
        self._tries, self._ended = tries, ended
        self._limits = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def call(
        self,
        verb: str,
        path: str,
        body: Object | str | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = JSON,
    ) -> Object:
        """Send a request, repeat it while the server is busy, and return the answer; {} if that is no object. kind: the
        media type of the body, or of the answer to a GET. Raises RemoteError.
        """
        for left in reversed(range(self._tries)):
            begun, code = time.monotonic(), "error"
            try:
                with self._in_a_sentence():
                    answer = await self._ask(verb, path, self._limits, body, query, kind)
                    data = await answer.read()
                code = str(answer.status)
            finally:
                if self._ended:
                    self._ended(verb, path, code, time.monotonic() - begun)
            if answer.status < 400:
                return _object(data, answer.status)
            if answer.status != 429 or not left:
                raise self._refusal(answer, data)
            named = answer.headers.get("Retry-After", "")
            await asyncio.sleep(
                min(float(named), MOST_BUSY_SECONDS) if re.fullmatch(r"\d{1,9}", named) else BUSY_SECONDS
            )
        raise AssertionError("unreachable")

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[str, None]:
        """Yield the lines of a pod's log as they come; a line of more than LARGEST_LINE bytes comes in pieces."""
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        with self._in_a_sentence():
            async with await self._ask("GET", path, limits, query=query) as answer:
                if answer.status >= 400:
                    raise self._refusal(answer, await answer.read())
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
    async def socket(self, path: str, query: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket through the API server, with the protocol v4.channel.k8s.io."""
        async with contextlib.AsyncExitStack() as opened:
            with self._in_a_sentence():
                client = await opened.enter_async_context(WsApiClient(self._configuration))
                request = await client.param_serialize(
                    "GET", quote(path), query_params=list(query.items()), auth_settings=["BearerToken"]
                )
                answer = await client.call_api(*request, _preload_content=False)
                try:
                    async with asyncio.timeout(self._limits.total):  # the client would ignore a time limit
                        socket = await opened.enter_async_context(answer.response)
                except aiohttp.WSServerHandshakeError as error:
                    message = f"the API server refuses {path}: {error.status} {error.message}"
                    raise ApiError(error.status, "", message) from None
            yield socket

    async def _ask(
        self,
        verb: str,
        path: str,
        limits: aiohttp.ClientTimeout,
        body: Object | str | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = JSON,
    ) -> aiohttp.ClientResponse:
        request = await self._client.param_serialize(
            verb,
            quote(path),
            query_params=list((query or {}).items()),
            header_params={"Accept": kind if verb == "GET" else JSON, "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*request, _request_timeout=limits)
        response: aiohttp.ClientResponse = answer.response
        return response

    @contextlib.contextmanager
    def _in_a_sentence(self) -> Iterator[None]:
        """Turn every failure to reach the API server into a ClusterUnreachable with one sentence for the user."""
        where = f"the cluster at {self._configuration.host} (context {self.access.context})"
        try:
            yield
        except aiohttp.ClientConnectorCertificateError as error:
            found = error.certificate_error
            why = getattr(found, "verify_message", "") or found
            raise ClusterUnreachable(f"{where} is not trusted: {why}") from None
        except TimeoutError:
            raise ClusterUnreachable(f"{where} does not answer in time") from None
        except (aiohttp.ClientError, OSError, ConfigException) as error:
            inner = getattr(error, "os_error", None) or error
            why = getattr(inner, "strerror", None) or said_by(inner)
            raise ClusterUnreachable(f"{where} cannot be reached: {why}") from None

    def _refusal(self, answer: aiohttp.ClientResponse, data: bytes) -> ApiError:
        """Return the ApiError for a response. Its text is the API server's message, which names verb, resource and
        user, or every wrong field; for a 401 it is a message of our own.
        """
        found = _object(data, answer.status)
        status, message = answer.status, str(found.get("message") or "")
        if status == 401:
            message = f"the cluster does not accept the credentials of context {self.access.context}; log in again"
        if status == 403:
            message = f"permission denied: {message or 'the API server forbids it'}"
        return ApiError(status, str(found.get("reason") or answer.reason or ""), " ".join(message.split()))


def _object(data: bytes, status: int) -> Object:
    """Parse a response as a JSON object; {} for any other JSON, and for a refusal in plain text, as from proxies and a
    busy API server. Raises ApiError if a successful answer (status below 400) is not JSON.
    """
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        if status < 400:
            raise ApiError(status, "NotJson", "an answer that is not JSON") from None
        return {}
    return found if isinstance(found, dict) else {}


# Paths


def jobs_path(namespace: str | None) -> str:
    """Return the API path of the BambooJobs in a namespace, or in all namespaces if it is None."""
    return f"/apis/{GROUP}/{VERSION}" + (f"/namespaces/{namespace}" if namespace else "") + f"/{PLURAL}"


def job_path(namespace: str, name: str) -> str:
    return f"{jobs_path(namespace)}/{name}"


def pods_path(namespace: str | None) -> str:
    """Return the API path of the pods in a namespace, or in all namespaces if it is None."""
    return "/api/v1" + (f"/namespaces/{namespace}" if namespace else "") + "/pods"


def pod_path(namespace: str, name: str) -> str:
    return f"{pods_path(namespace)}/{name}"


NODES_PATH = "/api/v1/nodes"


def node_path(name: str) -> str:
    return f"{NODES_PATH}/{name}"


def _events(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/events"


def _budgets(namespace: str) -> str:
    return f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"


def _revisions(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"


def lease_path(namespace: str, name: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"


def _only(uid: str, grace_seconds: int | None = None, propagation: str | None = None) -> Object:
    """Return DeleteOptions for the object with that UID only, not for a successor of the same name. grace_seconds: None
    for the pod's own. propagation: how owned objects are deleted, such as "Background"; None for the kind's default.
    """
    body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
    if grace_seconds is not None:
        body["gracePeriodSeconds"] = grace_seconds
    if propagation is not None:
        body["propagationPolicy"] = propagation
    return body


@contextlib.contextmanager
def _absence(codes: Collection[int] = (404,)) -> Iterator[list[ApiError]]:
    """Suppress an ApiError with one of these status codes, and append it to the list that this yields."""
    refusals: list[ApiError] = []
    try:
        yield refusals
    except ApiError as error:
        if error.status not in codes:
            raise
        refusals.append(error)


# Calls by kind


class KubeApi:
    """Bamboo's calls to an API server. Every method may raise a RemoteError, whose text is meant for the user."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self.call = connection, connection.call

    @property
    def access(self) -> Access:
        return self._connection.access

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    # jobs

    async def job(self, namespace: str, name: str) -> Object:
        return await self._call_job("GET", namespace, name)

    async def jobs(self, namespace: str | None) -> list[Object]:
        """Return the BambooJobs in a namespace, or in all namespaces if it is None."""
        try:
            return await self.listed(jobs_path(namespace))
        except ApiError as error:
            raise await self._explained(error, namespace or "", "") from None

    async def apply_job(self, namespace: str, document: Object, *, force: bool, dry_run: bool = False) -> Object:
        """Create the job, or merge the document into the existing one (server-side apply), and return it. force:
        overwrite fields that other managers own. dry_run: only check.
        """
        query = {"fieldManager": MANAGER, "force": str(force).lower()} | ({"dryRun": "All"} if dry_run else {})
        return await self._call_job("PATCH", namespace, document["metadata"]["name"], document, query, APPLY)

    async def patch_job(self, namespace: str, name: str, body: Object) -> Object:
        return await self._call_job("PATCH", namespace, name, body, {"fieldManager": MANAGER}, MERGE)

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete the job with that UID, and in the background everything it owns."""
        await self._call_job("DELETE", namespace, name, _only(uid, propagation="Background"))

    async def _call_job(
        self,
        verb: str,
        namespace: str,
        name: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = JSON,
    ) -> Object:
        try:
            return await self.call(verb, job_path(namespace, name), body, query, kind)
        except ApiError as error:
            raise await self._explained(error, namespace, name) from None

    async def write_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> None:
        """Merge fields into the status of the BambooJob with that UID; a field that is None is removed. Raises JobGone
        if there is no such job.
        """
        body = {"metadata": {"uid": uid}, "status": dict(status)}
        try:
            await self.call("PATCH", f"{job_path(namespace, name)}/status", body, kind=MERGE)
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and await self.uid_of(job_path(namespace, name)) != uid):
                raise JobGone(str(error)) from None
            raise

    async def _explained(self, error: ApiError, namespace: str, name: str) -> RemoteError:
        """Return a clearer error for a 404, the answer to a missing job, namespace or CRD; else the same error."""
        if error.status != 404:
            return error
        if str(error).startswith("namespaces "):
            return ApiError(404, "NoNamespace", f"there is no namespace {namespace}")
        if not await self._has_group():
            return ApiError(404, "NoCrd", f"the cluster has no {PLURAL}.{GROUP}: Bamboo is not installed there")
        if not name:
            return error
        return ApiError(404, "NotFound", f"there is no job {name} in namespace {namespace}")

    async def _has_group(self) -> bool:
        """Return whether the CRD, the only one of its group, is installed; True if the API server does not say."""
        try:
            await self.call("GET", f"/apis/{GROUP}/{VERSION}")
        except ApiError as error:
            return error.status != 404
        return True

    # pods, nodes, events

    async def pods(self, namespace: str, job: str) -> list[Object]:
        return await self.listed(pods_path(namespace), {"labelSelector": f"{LABEL_JOB_NAME}={job}"})

    async def read_pod(self, namespace: str, name: str) -> Object:
        return await self.call("GET", pod_path(namespace, name))

    async def create_pod(self, pod: Object) -> Object:
        return await self.call("POST", pods_path(pod["metadata"]["namespace"]), pod)

    async def try_pod(self, pod: Object) -> None:
        """Create the pod as a dry run. Raises ApiError with the API server's objections, including those to unknown
        fields, which it would otherwise drop.
        """
        strict = {"dryRun": "All", "fieldValidation": "Strict"}
        await self.call("POST", pods_path(pod["metadata"]["namespace"]), pod, strict)

    async def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        """Set a pod's label. value: None removes it."""
        body = {"metadata": {"labels": {label: value}}}
        await self.call("PATCH", pod_path(namespace, name), body, kind=MERGE)

    async def delete_pod(self, namespace: str, name: str, uid: str, grace_seconds: int | None = None) -> bool:
        """Delete the pod with that UID. Return False if it was gone already. grace_seconds: the pod's own if None; at 0
        its object is gone at once.
        """
        try:
            await self.call("DELETE", pod_path(namespace, name), _only(uid, grace_seconds))
        except ApiError as error:
            if error.status == 409 and await self.uid_of(pod_path(namespace, name)) == uid:
                raise  # an admission webhook may also answer 409
            if error.status not in (404, 409):
                raise
            return False
        return True

    async def nodes(self, names: set[str]) -> dict[str, Object]:
        """Return the nodes of these names that exist, by name; {} if the user may not read nodes."""
        answers = await asyncio.gather(*(self.find(node_path(name), (403, 404)) for name in sorted(names)))
        return {node["metadata"]["name"]: node for node in answers if node}

    async def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(self._connection.lines(f"{pod_path(namespace, pod)}/log", query)) as lines:
            async for line in lines:
                yield line

    def port(self, namespace: str, pod: str, port: int) -> contextlib.AbstractAsyncContextManager[Any]:
        """Open a WebSocket to a port of a pod (port forwarding)."""
        return self._connection.socket(f"{pod_path(namespace, pod)}/portforward", {"ports": str(port)})

    async def events(self, namespace: str, kind: str, name: str | None = None) -> list[Object]:
        """Return the events about objects of that kind, or about the one of that name."""
        selected = f"involvedObject.kind={kind}" + (f",involvedObject.name={name}" if name else "")
        return await self.listed(_events(namespace), {"fieldSelector": selected})

    async def pod_events(self, namespace: str, uid: str) -> list[Object]:
        """Return events about the pod with that UID, in any order and at most POD_EVENTS."""
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(POD_EVENTS)}
        found: list[Object] = (await self.call("GET", _events(namespace), query=query)).get("items") or []
        return found

    async def create_event(self, event: Object) -> Object:
        return await self.call("POST", _events(event["metadata"]["namespace"]), event)

    async def count_event(self, namespace: str, name: str, count: int, last: str) -> bool:
        """Update an event's count and last time. Return False if the event is gone."""
        body = {"count": count, "lastTimestamp": last}
        with _absence() as gone:
            await self.call("PATCH", f"{_events(namespace)}/{name}", body, kind=MERGE)
        return not gone

    # objects that belong to a job

    async def apply_network_policy(self, policy: Object) -> None:
        namespace = policy["metadata"]["namespace"]
        await self._apply(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", policy)

    async def apply_disruption_budget(self, budget: Object) -> None:
        await self._apply(_budgets(budget["metadata"]["namespace"]), budget)

    async def delete_disruption_budget(self, namespace: str, name: str) -> None:
        await self._delete(f"{_budgets(namespace)}/{name}")

    async def list_revisions(self, namespace: str, selector: str) -> list[Object]:
        """Return the ControllerRevisions whose labels match the selector."""
        return await self.listed(_revisions(namespace), {"labelSelector": selector})

    async def create_revision(self, revision: Object) -> None:
        """Create a ControllerRevision. It is sent as YAML, so that the API server stores `data` as JSON in its own
        form. If it kept the client's JSON, each later patch would write `data` differently, and the API server would
        refuse the patch, because `data` is immutable.
        """
        await self.call("POST", _revisions(revision["metadata"]["namespace"]), json.dumps(revision), kind=YAML)

    async def delete_revision(self, namespace: str, name: str) -> None:
        await self._delete(f"{_revisions(namespace)}/{name}")

    # authentication and authorization

    async def token(self, namespace: str, account: str, audience: str, seconds: int) -> Object:
        """Request a token of a ServiceAccount (TokenRequest); return the request's status. seconds: its lifetime."""
        spec = {"audiences": [audience], "expirationSeconds": seconds}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return await self._reviewed(path, "authentication.k8s.io", "TokenRequest", spec)

    async def review_token(self, token: str, audiences: Sequence[str]) -> Object:
        """Have the API server check a bearer token (TokenReview); return the review's status."""
        spec = {"token": token, "audiences": list(audiences)}
        path = "/apis/authentication.k8s.io/v1/tokenreviews"
        return await self._reviewed(path, "authentication.k8s.io", "TokenReview", spec)

    async def review_access(self, user: Object, attributes: Mapping[str, str]) -> Object:
        """Ask the API server whether a user may do something (SubjectAccessReview); return the review's status. user:
        from the status of a TokenReview. attributes: verb, group, resource and so on.
        """
        spec = {
            "user": user.get("username") or "",
            "uid": user.get("uid") or "",
            "groups": user.get("groups") or [],
            "extra": user.get("extra") or {},
            "resourceAttributes": dict(attributes),
        }
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return await self._reviewed(path, "authorization.k8s.io", "SubjectAccessReview", spec)

    async def may(self, attributes: Mapping[str, str]) -> bool:
        """Return whether this client's own user may do something. attributes: verb, group, resource and so on."""
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        spec = {"resourceAttributes": dict(attributes)}
        status = await self._reviewed(path, "authorization.k8s.io", "SelfSubjectAccessReview", spec)
        return bool(status.get("allowed"))

    async def _reviewed(self, path: str, group: str, kind: str, spec: Object) -> Object:
        answer = await self.call("POST", path, {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec})
        status = answer.get("status")
        return status if isinstance(status, dict) else {}

    # the Lease

    async def read_lease(self, namespace: str, name: str) -> Object | None:
        """Return the Lease; None if there is none."""
        return await self.find(lease_path(namespace, name))

    async def create_lease(self, lease: Object) -> Object:
        path = lease_path(lease["metadata"]["namespace"], "")
        return await self.call("POST", path.rstrip("/"), lease)

    async def replace_lease(self, lease: Object) -> Object:
        """Write the Lease. Raises ApiError with status 409 if it has changed since it was read."""
        return await self.call("PUT", lease_path(lease["metadata"]["namespace"], lease["metadata"]["name"]), lease)

    # any kind

    async def metadata(self, path: str, labels: str = "") -> list[Object]:
        """Return the current metadata of all objects in a collection. labels: a selector."""
        query = {"labelSelector": labels, "limit": str(SMALL_PAGE)}
        return [item["metadata"] for item in await self.listed(path, query, METADATA)]

    async def listed(self, path: str, query: Mapping[str, str] | None = None, kind: str = JSON) -> list[Object]:
        """Return all objects of a collection that match the query, fetched in pages. kind: the answers' media type."""
        items: list[Object] = []
        asked = {"limit": str(PAGE), **(query or {})}
        while True:
            found = await self.call("GET", path, query=asked, kind=kind)
            items += found.get("items") or ()
            following = (found.get("metadata") or {}).get("continue")
            if not following:
                return items
            asked["continue"] = following

    async def find(self, path: str, absent: Collection[int] = (404,)) -> Object | None:
        """Return the object at that path; None if the answer's status code is one of `absent`."""
        with _absence(absent):
            return await self.call("GET", path)
        return None

    async def uid_of(self, path: str) -> str | None:
        """Return the UID of the object at that path; None if there is no object. This lists the object instead of
        getting it, because the operator may list and watch BambooJobs, but not get them.
        """
        collection, _, name = path.rpartition("/")
        found: Object = {}
        with _absence():  # 404 if the API server lacks the whole kind
            found = await self.call("GET", collection, query={"fieldSelector": f"metadata.name={name}"})
        uids = (str((item.get("metadata") or {}).get("uid")) for item in found.get("items") or ())
        return next(uids, None)

    async def _apply(self, collection: str, thing: Object) -> None:
        """Create the object, or set these fields of it, even if other clients manage them (server-side apply)."""
        await self.call("PATCH", f"{collection}/{thing['metadata']['name']}", thing, APPLIED, APPLY)

    async def _delete(self, path: str) -> None:
        """Delete the object at that path, if it exists."""
        with _absence():
            await self.call("DELETE", path)
