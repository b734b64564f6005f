"""Where the operator finds the API server when it runs in a pod."""

import pytest

from bamboo_operator.kube.credentials import _server_from_within


@pytest.mark.parametrize(
    ("host", "port", "server"),
    [
        (None, None, None),
        ("10.96.0.1", None, "https://10.96.0.1:443"),
        ("10.96.0.1", "6443", "https://10.96.0.1:6443"),
        ("fd00::1", "443", "https://[fd00::1]:443"),
        ("api.example.com", "443", "https://api.example.com:443"),
    ],
)
def test_the_api_server_is_the_one_that_the_kubelet_names(
    monkeypatch: pytest.MonkeyPatch, host: str | None, port: str | None, server: str | None
) -> None:
    for name, value in (("KUBERNETES_SERVICE_HOST", host), ("KUBERNETES_SERVICE_PORT", port)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    assert _server_from_within() == server
