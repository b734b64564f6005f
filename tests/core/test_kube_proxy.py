"""What the environment says about proxies on the way to the API server."""

import pytest

from bamboo_core.kube import kubeconfig as config
from bamboo_core.kube.errors import ConfigError


def test_no_proxy_stands_between_this_machine_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:1")
    assert config.environment_proxy("https://127.0.0.1:6443") is None
    assert config.environment_proxy("https://cluster.invalid") == "http://proxy.invalid:1"
    monkeypatch.setenv("no_proxy", ".invalid")
    assert config.environment_proxy("https://cluster.invalid") is None


@pytest.mark.parametrize(
    ("exceptions", "server", "proxied"),
    [
        ("10.0.0.0/8", "10.1.2.3:6443", False),
        ("10.0.0.0/8", "11.1.2.3:6443", True),
        ("10.0.0.0/8", "cluster.invalid", True),
        ("a.invalid, 192.168.0.0/16 ,b.invalid", "192.168.7.1", False),
        ("192.168.7.9/16", "192.168.7.1", False),  # the network of that address
        ("fd00::/8", "[fd12::1]:6443", False),
        ("fd00::/8", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.3", False),
        ("10.0.0.0/99,.invalid", "cluster.invalid", False),
        ("*", "cluster.invalid", False),
        ("", "10.1.2.3", True),
    ],
)
def test_networks_are_kept_from_the_proxy(
    monkeypatch: pytest.MonkeyPatch, exceptions: str, server: str, proxied: bool
) -> None:
    for name in ("HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:1")
    monkeypatch.setenv("no_proxy", exceptions)
    assert config.environment_proxy(f"https://{server}") == ("http://proxy.invalid:1" if proxied else None)


def test_what_the_environment_says_about_proxies_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "proxy.invalid:3128")  # as kubectl takes it
    assert config.environment_proxy("https://cluster.invalid") == "http://proxy.invalid:3128"
    monkeypatch.setenv("https_proxy", "socks5://me:secret@proxy.invalid:1")
    with pytest.raises(ConfigError, match=r"^HTTPS_PROXY: expected a URL that begins with http://") as error:
        config.environment_proxy("https://cluster.invalid")
    assert "secret" not in str(error.value)
    assert config.environment_proxy("https://127.0.0.1:6443") is None
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    assert config.environment_proxy("https://10.0.0.1") is None
