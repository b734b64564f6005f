"""The operator's API server address and credentials, in a pod and outside of one."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.config import incluster_config

from bamboo_core.kube import api
from bamboo_operator.kube.access import ApiCallCounts, connect, kopf_login, operator_access, resource_of
from http_kit import serving
from remote_kit import kubeconfig


async def test_in_a_pod_its_service_account_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", tmp_path / "token")
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", tmp_path / "ca.crt")
    monkeypatch.setattr(api, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", "https://elsewhere:6443")))
    access = await operator_access()
    assert access.configuration.host == "https://10.96.0.1:443"
    assert (await kopf_login(access)).as_http_headers() == {"Authorization": "Bearer token"}


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
        access = await operator_access()
        kopfs = await kopf_login(access)
        async with aiohttp.ClientSession(headers=kopfs.as_http_headers()) as session, session.get(kopfs.server):
            pass
        assert kopfs == await kopf_login(access), "no use to log in once more"
        ours = connect(access, ApiCallCounts(), 1)
        await ours.call("GET", "/")
        await ours.close()
    assert asked == ["Bearer t", "Bearer t"]


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/a/pods", "pods"),
        ("/api/v1/namespaces/a/pods/x-w1", "pods"),
        ("/api/v1/namespaces/namespaces/pods/pods", "pods"),
        ("/apis/bamboo.dev/v1alpha1/namespaces/a/bamboojobs/x/status", "bamboojobs/status"),
        ("/apis/authentication.k8s.io/v1/tokenreviews", "tokenreviews"),
        ("/apis/networking.k8s.io/v1/namespaces/a/networkpolicies", "networkpolicies"),
    ],
)
def test_calls_are_told_apart_by_resource_and_not_by_name(path: str, resource: str) -> None:
    assert resource_of(path) == resource
