"""The operator's process without a cluster: it waits for the Lease and the CRD, labels its pod, and filters its log."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_core.names import GROUP, PLURAL, VERSION
from bamboo_operator.kube.lease import ActiveLabel, LeaseName, lease_held_by
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.process import OperatorOptions, run_operator
from bamboo_operator.watch_handlers import KopfRepetitions
from http_kit import serving
from remote_kit import kubeconfig

PLACE = LeaseName("system", "operator")
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@contextlib.asynccontextmanager
async def api_server(folder: Path, holder: str) -> AsyncIterator[list[str]]:
    """Serve one Lease and its holder's pod, write `folder`/kubeconfig for the server, and yield a list of requests."""
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
    """The pods of an API server that does not answer while `away`. labels: the label's value, by pod."""

    def __init__(self) -> None:
        self.labels: dict[str, str | None] = {}
        self.away = True

    async def label_pod(self, namespace: str, name: str, label: str, value: str | None) -> None:
        if self.away:
            raise ClusterUnreachable("late")
        self.labels[name] = value


async def test_who_has_given_up_labels_itself_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that has lost the Lease does not label its pod, even if the API server answers again."""
    monkeypatch.setattr("bamboo_operator.kube.attempts.FIRST_RETRY", 0.01)
    pods = SlowPods()
    label = ActiveLabel(pods, PLACE, "me")
    taking = asyncio.create_task(label.take(["other"]))
    await asyncio.sleep(0)
    await label.give_up()
    pods.away = False
    await asyncio.wait_for(taking, 30)
    assert pods.labels.get("me") is None


# the CRD, which may be installed late and deleted at any time

JOBS = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SEEN = {"resourceVersion": "1"}


def kind(plural: str, name: str, *, namespaced: bool) -> dict[str, object]:
    verbs = ["list", "watch", "patch"]
    return {"kind": name, "name": plural, "singularName": "", "namespaced": namespaced, "verbs": verbs}


KINDS = {
    "/api/v1": [
        kind("pods", "Pod", namespaced=True),
        kind("nodes", "Node", namespaced=False),
        kind("namespaces", "Namespace", namespaced=False),
    ],
    "/apis/apiextensions.k8s.io/v1": [kind("customresourcedefinitions", "CustomResourceDefinition", namespaced=False)],
}


class ApiServer:
    """An empty API server. served: the CRD exists. told: its CRD watch reports a `change`, or else jobs' watch ends."""

    def __init__(self, *, served: bool, told: bool = True) -> None:
        self.served, self.told = served, told
        self.watched = asyncio.Event()  # set when a watch of jobs begins
        self._changed = asyncio.Event()

    def change(self, *, served: bool) -> None:
        self.served = served
        self._changed.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.startswith(f"/apis/{GROUP}") and not self.served:
            missing = {"kind": "Status", "code": 404, "reason": "NotFound", "message": "none"}
            return web.json_response(missing, status=404)
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            groups = {"apiextensions.k8s.io": "v1", **({GROUP: VERSION} if self.served else {})}
            versions = {name: {"version": version} for name, version in groups.items()}
            shown = [{"name": name, "versions": [one], "preferredVersion": one} for name, one in versions.items()]
            return web.json_response({"groups": shown})
        if path in (*KINDS, f"/apis/{GROUP}/{VERSION}"):
            return web.json_response({"resources": KINDS.get(path) or [kind(PLURAL, "BambooJob", namespaced=True)]})
        if "watch" not in request.query:
            return web.json_response({"metadata": SEEN, "items": []})
        return await self._watch(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        if request.path == JOBS:
            self.watched.set()
        if request.path == JOBS and not self.told:
            await self._changed.wait()
            return stream
        if request.path == CRDS and self.told:
            await self._changed.wait()
            names = {"plural": PLURAL, "kind": "BambooJob"}
            spec = {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [{"name": VERSION}]}
            crd = {"metadata": {"name": f"{PLURAL}.{GROUP}", "uid": "u", **SEEN}, "spec": spec}
            change = {"type": "ADDED" if self.served else "DELETED", "object": crd}
            await stream.write(json.dumps(change).encode() + b"\n")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return stream


@contextlib.asynccontextmanager
async def operator(
    server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> AsyncIterator[asyncio.Task[None]]:
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    monkeypatch.setattr("bamboo_operator.cluster.resync.FIRST_SECONDS", 0.05)
    stop = asyncio.Event()
    chosen = replace(options(port), lease=None)
    async with serving(server.answer) as url:
        kubeconfig(folder / "kubeconfig", url, {"token": "t"})
        running = asyncio.create_task(run_operator(chosen, stop))
        try:
            yield running
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 60)


async def test_it_ends_in_a_sentence_when_the_watch_of_jobs_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unused_tcp_port_factory: Callable[[], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ApiServer(served=True, told=False)
    caplog.handler.addFilter(KopfRepetitions())
    async with operator(server, tmp_path, monkeypatch, unused_tcp_port_factory()) as running:
        await asyncio.wait_for(server.watched.wait(), 60)
        server.change(served=False)
        await asyncio.wait_for(running, 60)
    said = [r for r in caplog.records if "there is no CRD of BambooJobs any more" in r.getMessage()]
    assert len(said) == 1
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR], caplog.text


async def test_it_waits_for_the_crd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port_factory: Callable[[], int]
) -> None:
    server, port = ApiServer(served=False), unused_tcp_port_factory()
    async with asyncio.timeout(60), operator(server, tmp_path, monkeypatch, port) as running:
        await answer_of("readyz", port, running, "cannot list BambooJobs")
        assert (running.done(), server.watched.is_set()) == (False, False)
        server.change(served=True)
        await server.watched.wait()
        await answer_of("readyz", port, running, "ok")


def test_what_kopf_says_of_each_try_is_not_logged() -> None:
    for name, message, kept in (
        ("kopf._cogs.clients.api", "Request attempt #3/721 failed; will retry: GET /api/v1/nodes -> 503", False),
        ("kopf._core.reactor", "Activity 'login' failed", True),
        ("bamboo_operator", "Request attempt #3/721 failed", True),
    ):
        assert KopfRepetitions().filter(logging.makeLogRecord({"name": name, "msg": message})) is kept
