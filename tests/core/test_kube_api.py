"""What the command line asks an API server, and what is said of refusals."""

import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.kube import kubeconfig as config
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.credentials import tls_context
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, ConfigError
from bamboo_core.kube.kubeconfig import Access, ClusterServer, User
from kube_server_kit import ask
from remote_kit import Asked, job, kubeconfig, refusal, server


@pytest.mark.parametrize(
    ("user", "headers"),
    [
        ({"token": "t"}, {"Authorization": "Bearer t"}),
        ({"username": "u", "password": "p"}, {"Authorization": "Basic dTpw"}),
        (
            {"token": "t", "as": "her", "as-groups": ["g"], "as-user-extra": {"why": ["x"]}},
            {"Impersonate-User": "her", "Impersonate-Group": "g", "Impersonate-Extra-why": "x"},
        ),
    ],
)
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
    from bamboo_core.kube.credentials import Credential

    return Credential()


def _pair(folder: Path) -> tuple[str, str]:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=x",
        "-days",
        "2",
        "-keyout",
        str(folder / "key"),
        "-out",
        str(folder / "cert"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl is missing: apt-get install openssl")
    return (folder / "cert").read_text(), (folder / "key").read_text()


def test_a_server_that_is_not_there() -> None:
    access = Access(context="c", server=ClusterServer(url="http://127.0.0.1:1"), user=User())
    with pytest.raises(
        ClusterUnreachable, match=r"^the cluster at http://127.0.0.1:1 \(context c\) cannot be reached: "
    ):
        ask(access, lambda api: api.job("team", "story"))


NOT_INSTALLED = "the cluster has no bamboojobs.bamboo.dev: Bamboo is not installed there"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (200, "there is no job story in namespace team"),
        (404, NOT_INSTALLED),
        (403, "there is no job story in namespace team"),
    ],
)
def test_a_job_that_is_not_there_and_a_cluster_without_bamboo(status: int, said: str) -> None:
    def answered(asked: Asked) -> tuple[int, Any]:
        group = asked.path == "/apis/bamboo.dev/v1alpha1"
        return (status, {"resources": []}) if group else refusal(404, "NotFound", "404")

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
