"""The way to a cluster: kubeconfigs, credential plugins, certificates, and what is said when it is barred."""

import asyncio
import base64
import json
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bamboo.kube import kubeconfig as config
from bamboo.kube.api import KubeApi
from bamboo.kube.credentials import answer, tls_context
from bamboo.kube.credentials import request as asked_of_plugin
from bamboo.kube.errors import ApiError, ClusterUnreachable, ConfigError, RemoteError
from bamboo.kube.kubeconfig import Access, ClusterServer, ExecPlugin, User
from remote_kit import Asked, job, kubeconfig, refusal, server

V1 = "client.authentication.k8s.io/v1"


def ask(access: Access, call: Callable[[KubeApi], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with KubeApi(access) as api:
            return await call(api)

    return asyncio.run(run())


def plugin(folder: Path, body: str) -> str:
    """An executable in Python, beside the kubeconfig."""
    path = folder / "plugin"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return "./plugin"


# Files


def test_the_current_context_is_taken_and_another_one_on_request(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "https://a:6443/", {"token": "t"}, **{"tls-server-name": "b"})
    found = config.load(str(path))
    assert (found.context, found.namespace, found.server.url) == ("here", "team", "https://a:6443")
    assert (found.server.tls_name, found.user.token) == ("b", "t")
    assert config.load(str(path), "elsewhere").namespace == "default"


def test_several_files_are_merged_and_the_first_wins(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.write_text("current-context: here\nclusters: [{name: c, cluster: {server: 'https://first'}}]\n")
    two = kubeconfig(tmp_path / "two", "https://second", {"token": "t"})
    found = config.load(None, None, {"KUBECONFIG": os.pathsep.join([str(one), str(tmp_path / "none"), str(two)])})
    assert (found.server.url, found.user.token, found.namespace) == ("https://first", "t", "team")


def test_paths_in_a_file_are_relative_to_it_and_data_win(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("CA")
    (tmp_path / "cert.pem").write_text("CERT")
    data = base64.b64encode(b"KEY").decode()
    user = {"client-certificate": "cert.pem", "client-key-data": data, "client-key": "no-such", "tokenFile": "token"}
    found = config.load(str(kubeconfig(tmp_path / "config", "https://a", user, **{"certificate-authority": "ca.pem"})))
    assert (found.server.authority, found.user.certificate, found.user.key) == ("CA", "CERT", "KEY")
    assert found.user.token_file == tmp_path / "token"
    assert "KEY" not in repr(found)


def test_the_home_folder_and_the_pod_are_the_last_resorts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no cluster: there is no kubeconfig .*\.kube/config\); set KUBECONFIG$"):
        config.load(None, None, {"HOME": str(tmp_path)})
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", "https://home")
    assert config.load(None, None, {"HOME": str(tmp_path)}).server.url == "https://home"


def test_inside_a_pod_its_service_account_is_used(tmp_path: Path) -> None:
    for name, text in (("token", "t1"), ("ca.crt", "CA"), ("namespace", "mine\n")):
        (tmp_path / name).write_text(text)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = config.in_cluster(environment, tmp_path)
    assert found is not None
    assert (found.server.url, found.namespace, found.server.authority) == ("https://[fd00::1]:443", "mine", "CA")
    assert config.in_cluster({}, tmp_path) is None


@pytest.mark.parametrize(
    ("text", "context", "said"),
    [
        ("[1]", None, "expected a kubeconfig, which is an object"),
        ("a: [", None, "not valid YAML"),
        ("{}", None, "no current-context is set; expected --context, one of none"),
        ("current-context: x", None, "current-context x: no such context"),
        ("current-context: x\ncontexts: [{name: y}]", "z", "--context z: no such context; expected one of y"),
        ("current-context: x\ncontexts: [{name: x, context: {cluster: c}}]", None, "names the cluster c, which is not"),
        ("current-context: x\ncontexts: 3", None, "contexts: expected a list"),
    ],
)
def test_a_wrong_kubeconfig_is_named(tmp_path: Path, text: str, context: str | None, said: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        config.load(str(path), context)
    assert said in str(error.value)
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("user", "cluster", "said"),
    [
        ({}, {"server": "a:6443"}, "server: expected a URL"),
        ({}, {"proxy-url": "socks5://a:1"}, "proxy-url: expected a URL that begins with http"),
        ({"auth-provider": {"name": "gcp"}}, {}, "auth-provider gcp: no longer supported; expected exec"),
        ({"client-certificate-data": "x!"}, {}, "client-certificate-data: expected base64"),
        ({"client-certificate-data": "QQ=="}, {}, "expected both client-certificate and client-key"),
        ({"client-key": "gone", "client-certificate-data": "QQ=="}, {}, "gone cannot be read: No such file"),
        ({"exec": {"args": []}}, {}, "exec: expected an object with a command"),
    ],
)
def test_wrong_entries_are_named(tmp_path: Path, user: Any, cluster: Any, said: str) -> None:
    path = kubeconfig(tmp_path / "config", "https://a", user, **cluster)
    with pytest.raises(ConfigError, match=said):
        config.load(str(path))


# Who the user is


@pytest.mark.parametrize(
    ("user", "headers"),
    [
        ({"token": "t"}, {"Authorization": "Bearer t"}),
        ({"username": "u", "password": "p"}, {"Authorization": "Basic dTpw"}),
        ({"token": "t", "as": "her", "as-groups": ["g"], "as-user-extra": {"why": ["x"]}},
         {"Impersonate-User": "her", "Impersonate-Group": "g", "Impersonate-Extra-why": "x"}),
    ],
)  # fmt: skip
def test_the_server_sees_who_asks(tmp_path: Path, user: Any, headers: dict[str, str]) -> None:
    with server(lambda asked: (200, job())) as (url, seen):
        ask(config.load(str(kubeconfig(tmp_path / "c", url, user))), lambda api: api.job("team", "story"))
    assert headers.items() <= seen[0].headers.items()
    assert seen[0].path == "/apis/bamboo.dev/v1alpha1/namespaces/team/bamboojobs/story"


@pytest.mark.parametrize("from_environment", [False, True])
def test_a_proxy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_environment: bool) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with server(lambda asked: (200, job())) as (url, seen):
        cluster = {} if from_environment else {"proxy-url": url}
        if from_environment:
            monkeypatch.setenv("http_proxy", url)
        path = kubeconfig(tmp_path / "c", "http://cluster.invalid:6443", {"token": "t"}, **cluster)
        ask(config.load(str(path)), lambda api: api.job("team", "story"))
    assert seen[0].headers["Host"] == "cluster.invalid:6443"


def test_a_token_file_is_read_anew_each_time(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")

    async def twice(api: KubeApi) -> None:
        await api.job("team", "story")
        (tmp_path / "token").write_text("two\n")
        await api.job("team", "story")

    with server(lambda asked: (200, job())) as (url, seen):
        ask(config.load(str(kubeconfig(tmp_path / "c", url, {"tokenFile": "token"}))), twice)
    assert [one.headers["Authorization"] for one in seen] == ["Bearer one", "Bearer two"]


# Plugins


COUNTING = """
runs = int(open("runs").read() or 0) + 1 if os.path.exists("runs") else 1
open("runs", "w").write(str(runs))
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
open("info", "w").write(json.dumps(info))
status = {"token": f"{os.environ['PREFIX']}{runs}{sys.argv[1]}", "expirationTimestamp": os.environ.get("EXPIRES")}
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}))
"""


def exec_user(folder: Path, body: str = COUNTING, expires: str = "2099-01-01T00:00:00Z", **more: Any) -> Any:
    env = [{"name": "PREFIX", "value": "p"}, {"name": "EXPIRES", "value": expires}]
    return {"exec": {"apiVersion": V1, "command": plugin(folder, body), "args": ["-x"], "env": env, **more}}


def test_a_plugin_is_run_once_and_again_when_its_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def answered(asked: Asked) -> tuple[int, Any]:
        return (200, job()) if asked.headers["Authorization"] != "Bearer p1-x" else refusal(401, "Unauthorized", "old")

    async def thrice(api: KubeApi) -> None:
        for _ in range(3):
            await api.job("team", "story")

    with server(answered) as (url, seen):
        ask(config.load(str(kubeconfig(tmp_path / "c", url, exec_user(tmp_path)))), thrice)
    assert [one.headers["Authorization"][-4:] for one in seen] == ["p1-x", "p2-x", "p2-x", "p2-x"]
    assert json.loads(Path("info").read_text()) == {
        "apiVersion": V1, "kind": "ExecCredential", "spec": {"interactive": False},
    }  # fmt: skip


def test_a_token_that_has_expired_is_renewed_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    user = exec_user(tmp_path, expires="2020-01-01T00:00:00Z")
    with server(lambda asked: (200, job())) as (url, seen):
        ask(config.load(str(kubeconfig(tmp_path / "c", url, user))), lambda api: api.job("team", "story"))
    assert seen[0].headers["Authorization"] == "Bearer p2-x"


def test_a_refusal_that_lasts_is_told_after_one_more_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with server(lambda asked: refusal(401, "Unauthorized", "no")) as (url, seen):
        access = config.load(str(kubeconfig(tmp_path / "c", url, exec_user(tmp_path))))
        with pytest.raises(ApiError, match="does not accept the credentials"):
            ask(access, lambda api: api.job("team", "story"))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("body", "more", "said"),
    [
        ("sys.exit(3)", {}, "gave no credentials: it ended with exit code 3"),
        ("print('{')", {}, "printed no ExecCredential in JSON"),
        ("print('{}')", {}, "printed no ExecCredential with a status"),
        (
            COUNTING,
            {"command": "no-such-plugin", "installHint": "Install it:\n pip"},
            "No such file .*; Install it: pip",
        ),
        (COUNTING, {"interactiveMode": "Always"}, "needs to prompt, and there is no terminal"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, more: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    access = config.load(str(kubeconfig(tmp_path / "c", "http://127.0.0.1:1", exec_user(tmp_path, body, **more))))
    with pytest.raises(RemoteError, match=said):
        ask(access, lambda api: api.job("team", "story"))


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ({"apiVersion": "v9", "status": {"token": "secret"}}, "speaks v9; expected client.authentication.k8s.io/v1"),
        ({"apiVersion": V1, "status": {}}, "neither a token nor a certificate"),
        ({"apiVersion": V1, "status": {"clientCertificateData": "x"}}, "neither a token nor a certificate"),
        (
            {"apiVersion": V1, "status": {"token": "secret", "expirationTimestamp": "soon"}},
            "no valid expirationTimestamp",
        ),
    ],
)
def test_a_plugins_answer_is_checked_and_never_shown(printed: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        answer(json.dumps(printed).encode(), ExecPlugin(command="p"))
    assert "secret" not in str(error.value)


def test_a_plugin_that_wants_the_cluster_is_told_of_it() -> None:
    access = Access(
        context="c",
        server=ClusterServer(url="https://a", authority="CA", tls_name="n"),
        user=User(),
        extension={"k": 1},
    )
    told = asked_of_plugin(ExecPlugin(command="p", pass_cluster=True), access, True)
    assert told["spec"] == {
        "interactive": True,
        "cluster": {
            "server": "https://a", "certificate-authority-data": "Q0E=", "tls-server-name": "n", "config": {"k": 1},
        },
    }  # fmt: skip


# TLS


def test_certificates_of_server_and_client_are_used(tmp_path: Path) -> None:
    pem = _pair(tmp_path)
    context = tls_context(
        ClusterServer(url="https://a", authority=pem[0]), User(certificate=pem[0], key=pem[1]), answer_none()
    )
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1
    assert (
        tls_context(ClusterServer(url="https://a", insecure=True), User(), answer_none()).verify_mode is ssl.CERT_NONE
    )
    for authority, certificate in (("nonsense", pem[0]), (pem[0], "nonsense")):
        with pytest.raises(ConfigError, match="expected a certificate"):
            tls_context(
                ClusterServer(url="https://a", authority=authority),
                User(certificate=certificate, key="k"),
                answer_none(),
            )


def test_authorities_that_only_python_3_13_refuses_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ssl.create_default_context

    def strict(**arguments: Any) -> ssl.SSLContext:
        """As from 3.13 on."""
        context = usual(**arguments)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    own = tls_context(ClusterServer(url="https://a", authority=_pair(tmp_path)[0]), User(), answer_none())
    assert not own.verify_flags & ssl.VERIFY_X509_STRICT
    assert own.verify_mode is ssl.CERT_REQUIRED
    public = tls_context(ClusterServer(url="https://a"), User(), answer_none())
    assert public.verify_flags & ssl.VERIFY_X509_STRICT


def answer_none() -> Any:
    from bamboo.kube.credentials import Credential

    return Credential()


def _pair(folder: Path) -> tuple[str, str]:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-subj", "/CN=x", "-days", "2",
               "-keyout", str(folder / "key"), "-out", str(folder / "cert")]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl is missing: apt-get install openssl")
    return (folder / "cert").read_text(), (folder / "key").read_text()


def test_a_server_with_a_strange_certificate_is_not_trusted(tmp_path: Path) -> None:
    import http.server
    import threading

    _pair(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as running:
        running.socket = context.wrap_socket(running.socket, server_side=True)
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            access = Access(
                context="c", server=ClusterServer(url=f"https://127.0.0.1:{running.server_port}"), user=User()
            )
            with pytest.raises(ClusterUnreachable, match="is not trusted: self-signed certificate"):
                ask(access, lambda api: api.job("team", "story"))
        finally:
            running.shutdown()
            thread.join()


# What the server says


def test_a_server_that_is_not_there() -> None:
    access = Access(context="c", server=ClusterServer(url="http://127.0.0.1:1"), user=User())
    with pytest.raises(
        ClusterUnreachable, match=r"^the cluster at http://127.0.0.1:1 \(context c\) cannot be reached: "
    ):
        ask(access, lambda api: api.job("team", "story"))


@pytest.mark.parametrize(
    ("crd", "said"),
    [
        (200, "there is no job story in namespace team"),
        (404, "the cluster has no bamboojobs.bamboo.dev: Bamboo is not installed there"),
    ],
)
def test_a_job_that_is_not_there_and_a_cluster_without_bamboo(crd: int, said: str) -> None:
    def answered(asked: Asked) -> tuple[int, Any]:
        group = asked.path == "/apis/bamboo.dev/v1alpha1"
        return (crd, {}) if group else refusal(404, "NotFound", "404")

    with server(answered) as (url, _):
        access = Access(context="c", server=ClusterServer(url=url), user=User())
        with pytest.raises(ApiError) as error:
            ask(access, lambda api: api.job("team", "story"))
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (
            403,
            {"reason": "Forbidden", "message": 'User "x" cannot list resource "pods"'},
            'permission denied: User "x" cannot',
        ),
        (403, b"<html>a proxy's page</html>", "permission denied: the API server forbids it"),
        (500, b"oh", "the API server answered 500 Internal Server Error"),
        (422, {"message": "spec.x:\n  wrong"}, "spec.x: wrong"),
    ],
)
def test_refusals_are_one_sentence(status: int, body: Any, said: str) -> None:
    with server(lambda asked: (status, body)) as (url, _):
        access = Access(context="c", server=ClusterServer(url=url), user=User())
        with pytest.raises(ApiError) as error:
            ask(access, lambda api: api.pods("team", "story"))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_lists_come_page_by_page() -> None:
    def answered(asked: Asked) -> tuple[int, Any]:
        page = int(asked.query.get("continue", "0"))
        following = {"continue": str(page + 1)} if page < 2 else {}
        return 200, {"items": [{"n": page}], "metadata": following}

    with server(answered) as (url, seen):
        access = Access(context="c", server=ClusterServer(url=url), user=User())
        assert ask(access, lambda api: api.pods("team", "story")) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert {one.query["limit"] for one in seen} == {"500"}


def test_a_log_comes_line_by_line_whatever_is_in_it() -> None:
    content = b"one\ntw\xffo\n\nlast" + b"\n" + b"x" * (3 << 20)

    async def read(api: KubeApi) -> list[str]:
        return [line async for line in api.log("team", "story-w0", {})]

    with server(lambda asked: (200, content)) as (url, _):
        lines = ask(Access(context="c", server=ClusterServer(url=url), user=User()), read)
    assert lines[:4] == ["one", "tw\ufffdo", "", "last"]
    assert sum(map(len, lines[4:])) == 3 << 20
