"""What the operator's process does while it waits for the Lease, without a cluster."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_operator.kube.lease import ActiveLabel, LeaseName, lease_held_by
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.process import OperatorOptions, run_operator
from http_kit import serving
from remote_kit import kubeconfig

PLACE = LeaseName("system", "operator")
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@contextlib.asynccontextmanager
async def api_server(folder: Path, holder: str) -> AsyncIterator[list[str]]:
    """Knows one Lease and its holder's pod, and remembers what is asked. KUBECONFIG names it."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        lease = lease_held_by(PLACE, None, holder, NOW)
        return web.json_response(lease if "/leases/" in request.path else {"metadata": {}, "status": {}})

    async with serving(answer) as url:
        kubeconfig(folder / "kubeconfig", url, {"token": "t"})
        yield asked


def options(port: int, *, label_active: bool = False) -> OperatorOptions:
    return OperatorOptions(
        listen=("127.0.0.1", 0),
        web_listen=("127.0.0.1", port),
        url=None,
        key=b"k" * 16,
        namespaces=[],
        lease=PLACE,
        workers=WorkerPodSettings(coordinator_url="", image="x"),
        certificate=None,
        identity="me",
        label_active=label_active,
    )


async def answer_of(path: str, port: int, operating: asyncio.Task[None], until: str = "held by") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        while not operating.done():
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"http://127.0.0.1:{port}/{path}") as answer:
                    text = await answer.text()
                    if until in text:
                        return answer.status, text
            await asyncio.sleep(0.01)
    raise AssertionError("it has ended") from operating.exception()


async def test_one_that_waits_ends_when_told_and_is_not_healthy_with_an_old_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Callable[[], int]
) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_text("one")
    monkeypatch.setattr("bamboo_operator.process.AUTHORITY_FILE", authority)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    stop = asyncio.Event()
    async with api_server(tmp_path, "other") as asked:
        port = unused_tcp_port_factory()  # chosen before, it could be the API server's too
        operating = asyncio.create_task(run_operator(options(port), stop))
        assert await answer_of("readyz", port, operating) == (503, "waiting for the lease held by other\n")
        assert await answer_of("healthz", port, operating, "ok") == (200, "ok\n")
        authority.write_text("two")
        assert await answer_of("healthz", port, operating, "stuck") == (503, "stuck\n")
        stop.set()
        await asyncio.wait_for(operating, 30)
    group, core = "apis/coordination.k8s.io/v1", "api/v1"
    reads = (f"{group}/namespaces/system/leases/operator", f"{core}/namespaces/system/pods/other")
    assert set(asked) == {f"GET /{path}" for path in reads}


async def test_one_of_several_is_ready_while_another_works_and_says_so_by_no_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Callable[[], int]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    stop = asyncio.Event()
    async with api_server(tmp_path, "other") as asked:
        port = unused_tcp_port_factory()
        operating = asyncio.create_task(run_operator(options(port, label_active=True), stop))
        assert await answer_of("readyz", port, operating, "ok") == (200, "ok\n")
        stop.set()
        await asyncio.wait_for(operating, 30)
    own = "PATCH /api/v1/namespaces/system/pods/me"
    assert asked.count(own) == 1, "once, for what an earlier process may have left"


class SlowPods:
    """Of an API server that does not answer for a while. labels: as they are."""

    def __init__(self) -> None:
        self.labels: dict[str, str | None] = {}
        self.away = True

    async def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        if self.away:
            raise ClusterUnreachable("late")
        self.labels[name] = value


async def test_who_has_given_up_labels_itself_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Lease is lost while the API server does not answer; another one works when it does again."""
    monkeypatch.setattr("bamboo_operator.kube.lease.LABEL_RETRY_SECONDS", 0.01)
    pods = SlowPods()
    label = ActiveLabel(pods, PLACE, "me")
    taking = asyncio.create_task(label.take(["other"]))
    await asyncio.sleep(0)
    await label.give_up()
    pods.away = False
    await asyncio.wait_for(taking, 30)
    assert pods.labels.get("me") is None
