"""The Kubernetes client: credentials, limits and counts of calls, and messages about refusals."""

import asyncio
import base64
import json
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.config import incluster_config
from kubernetes.aio.config.exec_provider import ExecProvider

from bamboo_core.kube import api as module
from bamboo_core.kube.api import JSON, Access, Connection, KubeApi, in_cluster, log_in, new_configuration
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, ConfigError, JobGone
from http_kit import serving
from remote_kit import Answer, Asked, job, kubeconfig, refusal, server

V1 = "client.authentication.k8s.io/v1"
PLUGIN = """
runs = int(open("runs").read()) + 1 if os.path.exists("runs") else 1
open("runs", "w").write(str(runs))
status = {"token": f"t{runs}", **json.loads(os.environ["STATUS"])}
print(json.dumps({"apiVersion": os.environ["SPOKEN"], "kind": "ExecCredential", "status": status}))
"""


def plugin(folder: Path, body: str = PLUGIN, spoken: str = V1, **status: str) -> dict[str, Any]:
    """Write a credential plugin; return its kubeconfig user. spoken, status: API version and fields of its answer."""
    path = folder / "plugin"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = [{"name": "STATUS", "value": json.dumps(status)}, {"name": "SPOKEN", "value": spoken}]
    return {"exec": {"apiVersion": V1, "command": str(path), "env": env}}


def ask(kubeconfig: object, call: Callable[[KubeApi], Awaitable[Any]], context: str | None = None) -> Any:
    """Log in with a kubeconfig, as a command does, and return the result of `call`."""

    async def run() -> Any:
        async with KubeApi(Connection(await log_in(str(kubeconfig), context))) as api:
            return await call(api)

    return asyncio.run(run())


def connected(url: str, script: Callable[[Connection], Awaitable[Any]], **options: Any) -> Any:
    """Run a script with an unauthenticated connection to the server, and return its result."""

    async def run() -> Any:
        configuration = new_configuration()
        configuration.host = url
        connection = Connection(Access(context="c", namespace="team", configuration=configuration), **options)
        try:
            return await script(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


async def story(api: KubeApi) -> Any:
    return await api.job("team", "story")


# Who asks


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, "Bearer t"),
        ({"tokenFile": "token"}, "Bearer of-file"),
        ({"username": "u", "password": "p"}, f"Basic {base64.b64encode(b'u:p').decode()}"),
    ],
)
def test_the_server_sees_who_asks(tmp_path: Path, user: dict[str, Any], header: str) -> None:
    (tmp_path / "token").write_text("of-file\n")
    with server(lambda asked: (200, job())) as (url, seen):
        ask(kubeconfig(tmp_path / "c", url, user), story)
    assert (seen[0].headers["Authorization"], seen[0].headers["User-Agent"]) == (header, "bamboo-cli")
    assert seen[0].path == "/apis/bamboo.dev/v1alpha1/namespaces/team/bamboojobs/story"


@pytest.mark.parametrize(
    ("expires", "tokens"),
    [
        ({}, ["t1", "t1"]),
        ({"expirationTimestamp": "2099-01-01T00:00:00Z"}, ["t1", "t1"]),
        ({"expirationTimestamp": "2020-01-01T00:00:00Z"}, ["t2", "t3"]),
    ],
)
def test_a_plugin_is_run_once_and_again_before_its_token_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expires: dict[str, str], tokens: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    async def twice(api: KubeApi) -> None:
        await story(api)
        await story(api)

    with server(lambda asked: (200, job())) as (url, seen):
        ask(kubeconfig(tmp_path / "c", url, plugin(tmp_path, **expires)), twice)
    assert [one.headers["Authorization"] for one in seen] == [f"Bearer {token}" for token in tokens]


@pytest.mark.parametrize(
    ("body", "spoken", "message"),
    [
        ("sys.exit('log in\\nfirst')", V1, "plugin gave no credentials; exec: process returned 1. b'log in"),
        ("print('{')", V1, "gave no credentials; exec: failed to decode process output"),
        (PLUGIN, "v9", "gave no credentials; exec: plugin api version v9 does not match"),
    ],
)
def test_nobody_asks_anonymously_after_a_plugin_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, spoken: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = kubeconfig(tmp_path / "c", "http://127.0.0.1:1", plugin(tmp_path, body, spoken))
    with pytest.raises(ConfigError) as error:
        ask(path, story)
    assert str(error.value).startswith(f"{path}: context here: the plugin {tmp_path}/plugin")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plugin_that_hangs_ends_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: ExecProvider) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ExecProvider, "run", hang)
    monkeypatch.setattr(module, "LOGIN_SECONDS", 0.01)
    with pytest.raises(ConfigError, match="context here cannot be used: TimeoutError"):
        ask(kubeconfig(tmp_path / "c", "http://127.0.0.1:1", plugin(tmp_path)), story)


@pytest.mark.parametrize(
    ("text", "context", "message"),
    [
        ("", None, "not a usable kubeconfig: "),
        ("a: [", None, "not a usable kubeconfig: "),
        ("[1]", None, "not a usable kubeconfig: "),
        ("contexts: 3", None, "not a usable kubeconfig: "),
        ("contexts: [{name: y, context: {cluster: c}}]", "z", "object with name z in "),
        ("contexts: [{name: y, context: {cluster: c}}]\ncurrent-context: y", None, "object with name c in "),
    ],
)
def test_a_wrong_kubeconfig_is_named(tmp_path: Path, text: str, context: str | None, message: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        ask(path, story, context)
    assert str(error.value).startswith(f"--context {context}: {path}: " if context else f"{path}: ")
    assert message in str(error.value)
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("user", "cluster", "message"),
    [
        ({}, {}, "context here names no user with credentials"),
        ({"as": "her", "token": "t"}, {}, "context here: impersonation (as) is not supported"),
        ({"username": "u"}, {}, "context here: its user gave no credentials"),
        ({"tokenFile": "none"}, {}, "context here cannot be used: "),
        ({"client-certificate-data": "x!"}, {}, "context here cannot be used: "),
        ({"token": "t"}, {"certificate-authority-data": "QQ=="}, "context here: its certificates cannot be used: "),
    ],
)
def test_wrong_credentials_are_named(tmp_path: Path, user: Any, cluster: dict[str, str], message: str) -> None:
    path = kubeconfig(tmp_path / "config", "https://127.0.0.1:1", user, **cluster)
    with pytest.raises(ConfigError) as error:
        ask(path, story)
    assert message in str(error.value)


async def test_the_pod_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^no cluster: there is no kubeconfig \(.*none\); set KUBECONFIG$"):
        await log_in()
    with pytest.raises(ConfigError, match=r"^--kubeconfig /no/such: no such file$"):
        await log_in("/no/such")
    for name, text in (("token", "t1"), ("ca.crt", "CA"), ("namespace", "mine\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", tmp_path / "token")
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", tmp_path / "ca.crt")
    monkeypatch.setattr(module, "ACCOUNT", tmp_path)
    assert in_cluster() is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = await log_in()
    assert (found.namespace, found.configuration.host) == ("mine", "https://[fd00::1]:443")


@pytest.mark.parametrize(
    ("cluster", "environment", "proxied"),
    [
        ({"proxy-url": "PROXY"}, {}, True),
        ({}, {"http_proxy": "PROXY"}, True),
        ({}, {"http_proxy": "PROXY", "no_proxy": ".invalid"}, False),
    ],
)
def test_a_proxy_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: dict[str, str],
    environment: dict[str, str],
    proxied: bool,
) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with server(lambda asked: (200, job())) as (url, seen):
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("PROXY", url))
        named = {name: value.replace("PROXY", url) for name, value in cluster.items()}
        path = kubeconfig(tmp_path / "c", "http://cluster.invalid:6443", **named)
        if proxied:
            ask(path, story)
        else:
            with pytest.raises(ClusterUnreachable):
                ask(path, story)
    assert [one.headers["Host"] for one in seen] == ["cluster.invalid:6443"] * proxied


def test_no_proxy_stands_between_this_machine_and_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    with server(lambda asked: (200, job())) as (url, _):
        ask(kubeconfig(tmp_path / "c", url), story)


# Calls


def asked(answer: Answer, script: Callable[[Connection], Awaitable[Any]], **options: Any) -> tuple[list[Asked], Any]:
    """Run a script against a fake server. Return the requests to it, and verb, path and code of each counted call."""
    ended: list[tuple[str, str, str]] = []
    with server(answer) as (url, seen):
        connected(url, script, ended=lambda verb, path, code, _: ended.append((verb, path, code)), **options)
    return seen, ended


def test_a_busy_server_is_asked_again_as_often_as_was_chosen_and_each_try_is_counted() -> None:
    left = iter(range(3))

    def answer(_: Asked) -> tuple[int, Any]:
        return (200, {"is": "there"}) if next(left, None) is None else refusal(429, "TooManyRequests", "busy")

    async def script(connection: Connection) -> None:
        with pytest.raises(ApiError, match=r"^busy$") as error:
            await connection.call("POST", "/pods", {"a": 1})
        assert (error.value.status, error.value.reason) == (429, "TooManyRequests")
        assert await connection.call("POST", "/pods", {"a": 1}) == {"is": "there"}

    seen, ended = asked(answer, script, tries=2)
    assert ended == [("POST", "/pods", code) for code in ("429", "429", "429", "200")]
    assert [one.body for one in seen] == [{"a": 1}] * 4


def test_a_call_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterUnreachable, match=r"^the cluster at .* \(context c\) does not answer in time$"):
            connected(url, lambda connection: connection.call("GET", "/pods"), seconds=0.1)
        with pytest.raises(ClusterUnreachable, match=r"does not answer in time$"):
            connected(url, lambda one: KubeApi(one).port("team", "story-w0", 1).__aenter__(), seconds=0.1)


async def test_an_error_of_the_caller_of_a_socket_is_not_blamed_on_the_cluster(tmp_path: Path) -> None:
    async def accept(request: web.Request) -> web.WebSocketResponse:
        await (accepted := web.WebSocketResponse(protocols=["v4.channel.k8s.io"])).prepare(request)
        return accepted

    async with serving(accept) as url, KubeApi(Connection(await log_in(str(kubeconfig(tmp_path / "c", url))))) as api:
        with pytest.raises(OSError, match=r"^full$"):
            async with api.port("team", "story-w0", 1):
                raise OSError("full")


def test_an_answer_is_an_object_in_json() -> None:
    answers = {
        "/object": (200, {"a": 1}),
        "/nothing": (200, b""),
        "/list": (200, [1]),
        "/page": (200, b"<html>"),
        "/refused": (503, b"<html>"),
        "/nested": (200, b"[" * 100_000),
    }

    async def script(connection: Connection) -> None:
        assert await connection.call("GET", "/object") == {"a": 1}
        assert await connection.call("GET", "/nothing") == {}
        assert await connection.call("GET", "/list") == {}
        for path, status, reason in (
            ("/page", 200, "NotJson"),
            ("/nested", 200, "NotJson"),
            ("/refused", 503, "Service Unavailable"),
        ):
            with pytest.raises(ApiError) as error:
                await connection.call("GET", path)
            assert (error.value.status, error.value.reason) == (status, reason)

    asked(lambda one: answers[one.path], script)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(
        ClusterUnreachable, match=r"^the cluster at http://127.0.0.1:1 \(context c\) cannot be reached: "
    ):
        connected("http://127.0.0.1:1", lambda connection: KubeApi(connection).job("team", "story"))


# What is said


NOT_INSTALLED = "the cluster has no bamboojobs.bamboo.dev: Bamboo is not installed there"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (200, "there is no job story in namespace team"),
        (404, NOT_INSTALLED),
        (403, "there is no job story in namespace team"),
    ],
)
def test_a_job_that_is_not_there_and_a_cluster_without_bamboo(status: int, message: str) -> None:
    def answered(asked: Asked) -> tuple[int, Any]:
        group = asked.path == "/apis/bamboo.dev/v1alpha1"
        return (status, {"resources": []}) if group else refusal(404, "NotFound", "404")

    with server(answered) as (url, _), pytest.raises(ApiError) as error:
        connected(url, lambda connection: KubeApi(connection).job("team", "story"))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            403,
            {"reason": "Forbidden", "message": 'User "x" cannot list resource "pods"'},
            'permission denied: User "x" cannot',
        ),
        (403, b"<html>a proxy's page</html>", "permission denied: the API server forbids it"),
        (401, {"message": "Unauthorized"}, "the cluster does not accept the credentials of context c; log in again"),
        (500, b"oh", "the API server answered 500 Internal Server Error"),
        (422, {"message": "spec.x:\n  wrong"}, "spec.x: wrong"),
    ],
)
def test_refusals_are_one_sentence(status: int, body: Any, message: str) -> None:
    with server(lambda asked: (status, body)) as (url, _), pytest.raises(ApiError) as error:
        connected(url, lambda connection: KubeApi(connection).pods("team", "story"))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_lists_come_page_by_page() -> None:
    def answered(asked: Asked) -> tuple[int, Any]:
        page = int(asked.query.get("continue", "0"))
        following = {"continue": str(page + 1)} if page < 2 else {}
        return 200, {"items": [{"n": page}], "metadata": following}

    with server(answered) as (url, seen):
        found = connected(url, lambda connection: KubeApi(connection).pods("team", "story"))
    assert found == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert {one.query["limit"] for one in seen} == {"500"}


def test_a_log_comes_line_by_line_whatever_is_in_it() -> None:
    content = b"one\ntw\xffo\n\nlast" + b"\n" + b"x" * (3 << 20)

    async def read(connection: Connection) -> list[str]:
        return [line async for line in KubeApi(connection).log("team", "story-w0", {})]

    with server(lambda asked: (200, content)) as (url, _):
        lines = connected(url, read)
    assert lines[:4] == ["one", "tw\ufffdo", "", "last"]
    assert sum(map(len, lines[4:])) == 3 << 20


# What is asked


POD = "/api/v1/namespaces/team/pods/job-w0"
JOB = "/apis/bamboo.dev/v1alpha1/namespaces/team/bamboojobs/job"
TAKEN, MISSING = ApiError(409, "Conflict", "taken"), ApiError(404, "NotFound", "there is none")


class Scripted:
    """A fake connection that returns or raises the answers given for each HTTP method in turn; {} for other methods."""

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
    """Return a list response with one object of this UID, or an empty list for None."""
    return {"items": [] if value is None else [{"metadata": {"uid": value}}]}


async def test_only_that_very_pod_is_deleted() -> None:
    server = Scripted()
    assert await KubeApi(server).delete_pod("team", "job-w0", "u1", grace_seconds=5)
    ((method, path, body, *_),) = server.calls
    assert (method, path) == ("DELETE", POD)
    assert body["preconditions"] == {"uid": "u1"}
    assert body["gracePeriodSeconds"] == 5


async def test_a_status_is_merged_into_the_very_job_and_no_other() -> None:
    server = Scripted()
    await KubeApi(server).write_status("team", "job", "u1", {"plan": None})
    ((method, path, body, _, kind),) = server.calls
    assert (method, path) == ("PATCH", f"{JOB}/status")
    assert body == {"metadata": {"uid": "u1"}, "status": {"plan": None}}
    assert kind == "application/merge-patch+json"


@pytest.mark.parametrize(
    ("refusal", "found"), [(MISSING, []), (TAKEN, [MISSING]), (TAKEN, [uid("u2")])], ids=["gone", "gone since", "next"]
)
async def test_an_object_that_is_gone_or_has_a_namesake_was_deleted_before(refusal: ApiError, found: Any) -> None:
    assert not await KubeApi(Scripted(DELETE=[refusal], GET=list(found))).delete_pod("team", "job-w0", "u1")
    with pytest.raises(JobGone):
        await KubeApi(Scripted(PATCH=[refusal], GET=list(found))).write_status("team", "job", "u1", {})


async def test_a_conflict_over_the_very_object_is_an_error() -> None:
    """A 409 is an error if the same object still exists, since an admission webhook may have caused it."""
    server = Scripted(DELETE=[TAKEN], PATCH=[TAKEN], GET=[uid("u1")] * 2)
    with pytest.raises(ApiError, match="taken"):
        await KubeApi(server).delete_pod("team", "job-w0", "u1")
    with pytest.raises(ApiError, match="taken"):
        await KubeApi(server).write_status("team", "job", "u1", {})


async def test_what_is_there_already_or_gone_already_is_no_error() -> None:
    await KubeApi(Scripted(DELETE=[MISSING])).delete_disruption_budget("team", "job")
    await KubeApi(Scripted(DELETE=[MISSING])).delete_revision("team", "job-1")
    with pytest.raises(ApiError):
        await KubeApi(Scripted(DELETE=[TAKEN])).delete_revision("team", "job-1")


@pytest.mark.parametrize("kind", ["networkpolicies", "poddisruptionbudgets"])
async def test_what_is_about_all_workers_is_made_or_changed_back(kind: str) -> None:
    server, thing = Scripted(), {"metadata": {"namespace": "team", "name": "bamboo-u1"}}
    of = KubeApi(server)
    await (of.apply_network_policy(thing) if kind == "networkpolicies" else of.apply_disruption_budget(thing))
    ((method, path, body, query, how),) = server.calls
    assert (method, path.partition("/namespaces/")[2], body) == ("PATCH", f"team/{kind}/bamboo-u1", thing)
    assert (query["force"], how) == ("true", "application/apply-patch+yaml")


async def test_whether_something_is_there_needs_no_other_right_than_its_watch() -> None:
    server = Scripted(GET=[uid("u1"), uid(None), MISSING])
    assert [await KubeApi(server).uid_of(JOB) for _ in range(3)] == ["u1", None, None]
    collection, _, name = JOB.rpartition("/")
    assert {(method, path, str(query)) for method, path, _, query, _ in server.calls} == {
        ("GET", collection, str({"fieldSelector": f"metadata.name={name}"}))
    }


async def test_of_many_objects_only_the_metadata_is_read() -> None:
    first = {"items": [{"metadata": {"uid": "u1"}}], "metadata": {"continue": "there"}}
    server = Scripted(GET=[first, uid("u2")])
    assert await KubeApi(server).metadata("/api/v1/pods", "ours") == [{"uid": "u1"}, {"uid": "u2"}]
    assert {(path, query["labelSelector"], kind) for _, path, _, query, kind in server.calls} == {
        ("/api/v1/pods", "ours", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")
    }


async def test_what_may_be_missing_is_none() -> None:
    assert await KubeApi(Scripted(GET=[MISSING])).read_lease("team", "x") is None
    with pytest.raises(ApiError):
        await KubeApi(Scripted(GET=[ApiError(403, "Forbidden", "no")])).read_lease("team", "x")


async def test_a_pod_is_tried_strictly_and_is_not_made() -> None:
    server = Scripted()
    await KubeApi(server).try_pod({"metadata": {"namespace": "team"}})
    ((_, _, _, query, _),) = server.calls
    assert query == {"dryRun": "All", "fieldValidation": "Strict"}


async def test_a_job_is_deleted_with_all_that_it_owns() -> None:
    server = Scripted()
    await KubeApi(server).delete_job("team", "job", "u1")
    ((method, path, body, *_),) = server.calls
    assert (method, path) == ("DELETE", JOB)
    assert body["propagationPolicy"] == "Background"
    assert body["preconditions"] == {"uid": "u1"}
