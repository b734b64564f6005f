"""Where the operator finds the API server, and as whom it is there."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bamboo_core.kube.errors import ConfigError
from bamboo_operator.kube.api_calls import ApiCallCounts
from bamboo_operator.kube.client import connect
from bamboo_operator.kube.credentials import kopf_session, operator_access
from http_kit import serving
from remote_kit import kubeconfig


@pytest.mark.parametrize(
    ("host", "port", "server"),
    [
        (None, None, "https://kubernetes.default.svc:443"),
        ("10.96.0.1", None, "https://10.96.0.1:443"),
        ("10.96.0.1", "6443", "https://10.96.0.1:6443"),
        ("fd00::1", "443", "https://[fd00::1]:443"),
        ("api.example.com", "443", "https://api.example.com:443"),
    ],
)
def test_in_a_pod_the_api_server_is_the_one_that_the_kubelet_names(
    tmp_path: Path, host: str | None, port: str | None, server: str
) -> None:
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text(name)
    elsewhere = kubeconfig(tmp_path / "config", "https://elsewhere:6443", {"token": "t"})
    named = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, "KUBECONFIG": str(elsewhere)}
    found = operator_access({name: value for name, value in named.items() if value}, tmp_path)
    assert found.server.url == server
    assert found.user.token_file == tmp_path / "token", "which is read again for each request, for it is rotated"


PLUGIN = {
    "apiVersion": "client.authentication.k8s.io/v1",
    "command": "echo",
    "args": ['{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"t"}}'],
    "interactiveMode": "Never",
}


@pytest.mark.parametrize("user", [{"token": "t"}, {"exec": PLUGIN}])
async def test_outside_a_pod_both_connections_lead_to_the_kubeconfigs_server_as_the_same_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: dict[str, Any]
) -> None:
    asked: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        return web.json_response({})

    async with serving(answer) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", url, user)))
        access = operator_access(account=tmp_path / "none")
        kopfs = await kopf_session(access, aiohttp.TraceConfig())
        async with kopfs.aiohttp_session as session, session.get(kopfs.server):
            pass
        async with kopfs.aiohttp_session as another:
            assert not another.closed
        assert kopfs == await kopf_session(access, aiohttp.TraceConfig()), "no use to log in once more"
        ours = connect(access, ApiCallCounts(), 1)
        await ours.call("GET", "/")
        await ours.close()
    assert asked == ["Bearer t", "Bearer t"]


def test_without_a_pod_and_a_kubeconfig_there_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no cluster: there is no kubeconfig"):
        operator_access({"HOME": str(tmp_path)}, tmp_path)
