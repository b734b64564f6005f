"""Kubeconfigs: which file and context, relative paths, and what is wrong in them."""

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.kube import kubeconfig as config
from bamboo_core.kube.errors import ConfigError
from remote_kit import kubeconfig


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
        ("[1]", None, "not a kubeconfig: expected `object`, got `array`"),
        ("a: [", None, "not valid YAML"),
        ("{}", None, "no current-context is set; expected --context, one of none"),
        ("current-context: x", None, "current-context x: no such context"),
        ("current-context: x\ncontexts: [{name: y}]", "z", "--context z: no such context; expected one of y"),
        ("current-context: x\ncontexts: [{name: x, context: {cluster: c}}]", None, "names the cluster c, which is not"),
        ("current-context: x\ncontexts: 3", None, "expected `array`, got `int` - at `$.contexts`"),
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
        (
            {"exec": {"command": "c", "args": 5}},
            {},
            r"user u: expected `array`, got `int` - at `\$.exec.args`",
        ),
        ({"exec": {"command": "c", "env": [{"value": "v"}]}}, {}, "missing required field `name`"),
        ({"as-groups": "team"}, {}, "expected `array`, got `str`"),
        ({"token": ["t"]}, {}, "expected `str`, got `array`"),
        ({}, {"extensions": 3}, "expected `array`, got `int`"),
        ({}, {"insecure-skip-tls-verify": "false"}, "expected `bool`, got `str`"),
    ],
)
def test_wrong_entries_are_named(tmp_path: Path, user: Any, cluster: Any, said: str) -> None:
    path = kubeconfig(tmp_path / "config", "https://a", user, **cluster)
    with pytest.raises(ConfigError, match=said):
        config.load(str(path))
