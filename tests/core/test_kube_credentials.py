"""Who one is for the API server: tokens, plugins, certificates."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.kube import kubeconfig as config
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.credentials import answer
from bamboo_core.kube.credentials import request as asked_of_plugin
from bamboo_core.kube.errors import ApiError, ConfigError, RemoteError
from bamboo_core.kube.kubeconfig import Access, ClusterServer, ExecPlugin, User
from kube_server_kit import ask
from remote_kit import Asked, job, kubeconfig, refusal, server

V1 = "client.authentication.k8s.io/v1"


def plugin(folder: Path, body: str) -> str:
    """An executable in Python, beside the kubeconfig."""
    path = folder / "plugin"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return "./plugin"


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
        "apiVersion": V1,
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }


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
    told = asked_of_plugin(ExecPlugin(command="p", provide_cluster_info=True), access, True)
    assert told["spec"] == {
        "interactive": True,
        "cluster": {
            "server": "https://a",
            "certificate-authority-data": "Q0E=",
            "tls-server-name": "n",
            "config": {"k": 1},
        },
    }
