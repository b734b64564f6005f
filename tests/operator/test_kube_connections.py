"""Where the operator finds the API server, and as whom it is there."""

from pathlib import Path

import kopf
import pytest

from bamboo_core.kube.errors import ConfigError
from bamboo_operator.kube.credentials import kopf_login, operator_access
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


def test_outside_a_pod_both_connections_lead_to_the_kubeconfigs_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubeconfig(tmp_path / "config", "https://a:6443", {"token": "t"})
    monkeypatch.setenv("KUBECONFIG", str(path))
    access = operator_access(account=tmp_path / "none")
    kopfs = kopf_login(kopf.OperatorSettings(), access)
    assert (access.server.url, access.user.token) == (kopfs.server, kopfs.token) == ("https://a:6443", "t")


def test_without_a_pod_and_a_kubeconfig_there_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no cluster: there is no kubeconfig"):
        operator_access({"HOME": str(tmp_path)}, tmp_path)
