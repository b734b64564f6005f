"""The workers' door: who comes in, what a stranger can make the operator do, and TLS."""

import asyncio
import base64
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bamboo.control.channel_events import ChannelClosed, ChannelEvent, Received, WorkerJoined
from bamboo.control.protocol import Heartbeat, Hello, Message, Refused, Stop
from bamboo.control.server import REFUSED_HEADER, Channels, Unauthorized
from bamboo.serving.listener import ConnectionBounds
from bamboo.serving.rate_limit import TokenBucket
from bamboo_operator.auth.pod_tokens import (
    REVIEWS_AT_ONCE,
    REVIEWS_WAITING,
    PodIdentity,
    TokenReviewer,
    claimed_identity,
    pod_authenticator,
)
from bamboo_operator.auth.serving_certificate import ServingCertificate
from bamboo_operator.auth.worker_gateway import WorkerGateway, workers_path
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.jobs.late_workers import DeletedJobs, stopping_late_workers
from bamboo_operator.kube.objects import JobKey
from bamboo_trainer.worker.control import Control
from certificates import issue

JOB = ("team", "job")


def token(pod: str = "job-w0", uid: str = "u0", namespace: str = "team", salt: str = "") -> str:
    """As a pod's looks, but signed by nobody."""
    claims = {"aud": ["bamboo.dev"], "kubernetes.io": {"namespace": namespace, "pod": {"name": pod, "uid": uid}}}
    return ".".join(_part(part) for part in ({"alg": "RS256", "salt": salt}, claims, {}))


def _part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


class ApiServer:
    """Knows the tokens that it has been told are good; counts what it is asked."""

    def __init__(self) -> None:
        self.good: dict[str, PodIdentity] = {}
        self.asked, self.at_once, self.most = 0, 0, 0
        self.seconds = 0.0

    async def review_token(self, token: str, audience: str) -> dict[str, Any]:
        self.asked += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.at_once -= 1
        who = self.good.get(token)
        if who is None:
            return {"authenticated": False}
        extra = {"authentication.kubernetes.io/pod-name": [who.pod], "authentication.kubernetes.io/pod-uid": [who.uid]}
        user = {"username": f"system:serviceaccount:{who.namespace}:default", "extra": extra}
        return {"authenticated": True, "audiences": [audience], "user": user}


class House:
    """A gateway with one job, whose pods are job-w0 (alive, u0) and job-w1 (lost)."""

    def __init__(self) -> None:
        self.server, self.gateway, self.events = ApiServer(), WorkerGateway(), list[ChannelEvent]()
        uids = {"job-w0": "u0", "job-w1": ""}
        check = pod_authenticator(JOB, TokenReviewer(self.server), uids.get)
        self.channels = Channels(self.events.append, check)
        self.url = ""

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def knock(self, header: str | None, place: str = workers_path(JOB)) -> tuple[int, str | None]:
        """The status of the answer, 101 for a WebSocket; and why one is refused."""
        headers = {} if header is None else {"Authorization": header}
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(self.url + place, headers=headers):
                    return 101, None
            except aiohttp.WSServerHandshakeError as error:
                return error.status, error.headers.get(REFUSED_HEADER) if error.headers else None


@contextlib.asynccontextmanager
async def house(tls: ssl.SSLContext | None = None) -> AsyncIterator[House]:
    place = House()
    port = await place.gateway.start("127.0.0.1", 0, tls)
    place.url = f"{'wss' if tls else 'ws'}://127.0.0.1:{port}"
    place.gateway.open(JOB, place.channels)
    try:
        yield place
    finally:
        await place.gateway.stop()


@pytest.mark.parametrize(
    ("header", "status", "why"),
    [
        (None, 403, "there is no token"),
        ("Basic abc", 403, "there is no token"),
        ("Bearer nonsense", 403, "the token is not that of a pod"),
        ("Bearer a.b.c", 403, "the token is not that of a pod"),
        (f"Bearer {token(namespace='other')}", 403, "the token is that of pod other/job-w0"),
        (f"Bearer {token(pod='job-w1')}", 403, "job-w1 is not a running pod of this job"),
        (f"Bearer {token(uid='u9')}", 403, "job-w0 is not a running pod of this job"),
        (f"Bearer {token(pod='job-w7')}", 503, None),
    ],
)
async def test_no_strangers_word_gets_as_far_as_the_api_server(header: str | None, status: int, why: str) -> None:
    async with house() as place:
        assert await place.knock(header) == (status, why)
        assert (place.server.asked, place.events) == (0, [])


async def test_what_the_api_server_does_not_vouch_for_stays_outside() -> None:
    async with house() as place:
        assert await place.knock(f"Bearer {token()}") == (503, None)
        place.server.good[token()] = PodIdentity("team", "job-w5", "u5")
        assert await place.knock(f"Bearer {token()}") == (403, "the token does not belong to the pod that it names")
        assert await place.knock(f"Bearer {token()}", "/v1/jobs/team/other/workers") == (404, None)
        assert (place.server.asked, place.events) == (2, [])


async def test_a_pod_comes_in_as_itself_only() -> None:
    async with house() as place, aiohttp.ClientSession() as session:
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        headers = {"Authorization": f"Bearer {token()}"}
        async with session.ws_connect(place.url + workers_path(JOB), headers=headers) as socket:
            await socket.send_str('{"type":"Hello","worker":"job-w1","host":"h","port":1}')
            assert "this is job-w0, not job-w1" in (await socket.receive()).data
        assert place.events == []


async def test_many_callers_wait_for_their_turn_and_too_many_are_sent_away() -> None:
    server = ApiServer()
    server.seconds = 0.05
    reviews = TokenReviewer(server)
    found = await asyncio.gather(
        *(reviews.of(token(salt=str(n))) for n in range(REVIEWS_WAITING + 20)), return_exceptions=True
    )
    assert server.most == REVIEWS_AT_ONCE
    assert sum(isinstance(answer, dict) for answer in found) == REVIEWS_WAITING
    assert {str(answer) for answer in found if isinstance(answer, Exception)} == {"too many callers"}
    assert await reviews.of("later") == {"authenticated": False}


def beat() -> Heartbeat:
    return Heartbeat(step=1)


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def talk(place: House, said: str, authority: str = "") -> list[Message]:
    """What a real worker's end hears that stays until it hears something, or has joined."""
    heard: list[Message] = []
    hello = Hello(worker="job-w0", host="h", port=1)
    control = Control(place.url + workers_path(JOB), lambda: said, lambda: hello, beat, heard.append, authority)
    control.start()
    try:
        await until(lambda: heard or place.of(WorkerJoined))
        if place.of(WorkerJoined):
            place.channels.send("job-w0", Stop(reason="Test"))
            await until(lambda: heard)
    finally:
        await asyncio.to_thread(control.close, 0.2)
    return heard


async def test_a_worker_that_may_not_come_in_is_told_so_and_can_end() -> None:
    async with house() as place:
        heard = await talk(place, token(uid="u9"))
        assert heard[0] == Refused(reason="Unauthorized", message="job-w0 is not a running pod of this job")


def certificate(folder: Path) -> ServingCertificate:
    issue(folder)
    return ServingCertificate(chain=folder / "tls.crt", key=folder / "tls.key", authority=folder / "ca.crt")


async def test_workers_talk_over_tls_to_whom_their_authority_vouches_for(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    async with house(files.context()) as place:
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        assert await talk(place, token(), files.trusted()) == [Stop(reason="Test")]


async def test_a_worker_says_nothing_to_somebody_else(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (mine := tmp_path / "mine").mkdir()
    async with house(certificate(other).context()) as place:
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await talk(place, token(), certificate(mine).trusted())
        assert (place.server.asked, place.events) == (0, [])


async def test_a_new_certificate_in_the_same_files_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_operator.auth.serving_certificate.POLL_SECONDS", 0.05)
    files = certificate(tmp_path)
    context = files.context()
    fresh = asyncio.create_task(files.keep_fresh(context))
    try:
        async with house(context) as place:
            place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
            renewed = certificate(tmp_path).trusted()
            heard: list[Message] = []

            async def heard_something() -> None:
                while not heard:
                    with contextlib.suppress(TimeoutError):
                        heard.extend(await talk(place, token(), renewed))

            await asyncio.wait_for(heard_something(), 60)
            assert heard == [Stop(reason="Test")]
    finally:
        fresh.cancel()


@pytest.mark.parametrize(("wrong", "read"), [("chain", "context"), ("key", "context"), ("authority", "trusted")])
def test_files_that_hold_no_certificate_are_refused(tmp_path: Path, wrong: str, read: str) -> None:
    files = certificate(tmp_path)
    getattr(files, wrong).write_text("no PEM")
    with pytest.raises(ssl.SSLError):
        getattr(files, read)()


DEEP = base64.urlsafe_b64encode(b'{"aud":' + b"[" * 5000).decode()


@pytest.mark.parametrize("pod", ["a\nb", "A", "", "x" * 300, "job-w0\r\nX: y"])
def test_a_token_that_names_what_is_no_name_is_refused(pod: str) -> None:
    with pytest.raises(Unauthorized, match="not that of a pod"):
        claimed_identity(token(pod=pod))


@pytest.mark.parametrize("text", ["", "a.b", ".".join([_part({}), _part({"aud": []}), ""]), "x" * 9000, f"a.{DEEP}.b"])
def test_a_token_that_names_no_pod_is_refused(text: str) -> None:
    with pytest.raises(Unauthorized, match="not that of a pod"):
        claimed_identity(text)


def test_who_says_too_much_is_slowed_down() -> None:
    allowance = TokenBucket(rate=10, burst=5, now=0.0)
    assert [allowance.wait(0.0) for _ in range(7)] == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2])
    assert allowance.wait(100.0) == 0


async def test_a_worker_that_floods_its_channel_is_heard_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo.control.server.MESSAGES_AT_ONCE", 10)
    monkeypatch.setattr("bamboo.control.server.MESSAGES_A_SECOND", 100.0)
    async with house() as place, aiohttp.ClientSession() as session:
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        headers = {"Authorization": f"Bearer {token()}"}
        async with session.ws_connect(place.url + workers_path(JOB), headers=headers) as socket:
            await socket.send_str('{"type":"Hello","worker":"job-w0","host":"h","port":1}')
            began = time.monotonic()
            for _ in range(60):
                await socket.send_str('{"type":"Heartbeat","step":1}')
            await until(lambda: len(place.of(Received)) == 60)
            assert time.monotonic() - began > 0.45, "50 of them at 100 a second"
        await until(lambda: place.of(ChannelClosed))


def pod_of(job: str, name: str, uid: str) -> dict[str, Any]:
    """job: its uid."""
    owner = {"kind": "BambooJob", "uid": job, "controller": True}
    labels = {"bamboo.dev/job-name": JOB[1]}
    metadata = {"name": name, "namespace": JOB[0], "uid": uid, "labels": labels, "ownerReferences": [owner]}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}}


async def test_workers_that_live_on_when_their_job_is_over_are_told_so() -> None:
    """Only as long as the operator looks after the job."""
    cluster = ClusterCache()
    cluster.pod_event("ADDED", pod_of("u-job", "job-w0", "u0"))
    async with house() as place, aiohttp.ClientSession() as session:
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        headers = {"Authorization": f"Bearer {token()}"}
        over = Stop(reason="JobOver", message="the job is over")
        async with (
            stopping_late_workers((JOB, "u-job"), cluster, place.gateway, TokenReviewer(place.server), over),
            session.ws_connect(place.url + workers_path(JOB), headers=headers) as socket,
        ):
            await socket.send_str('{"type":"Hello","worker":"job-w0","host":"h","port":1}')
            assert json.loads((await socket.receive()).data) == {
                "type": "Stop", "reason": "JobOver", "message": "the job is over"
            }  # fmt: skip
        assert await place.knock(f"Bearer {token()}") == (404, None)


async def test_more_workers_than_there_are_descriptors_for_come_again_later(caplog: pytest.LogCaptureFixture) -> None:
    place = House()
    port = await place.gateway.start("127.0.0.1", 0, bounds=ConnectionBounds(unauthenticated=8, known=1))
    place.url = f"ws://127.0.0.1:{port}"
    place.gateway.open(JOB, place.channels)
    place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
    headers = {"Authorization": f"Bearer {token()}"}
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(place.url + workers_path(JOB), headers=headers) as socket:
            await socket.send_str('{"type":"Hello","worker":"job-w0","host":"h","port":1}')
            await until(lambda: place.of(WorkerJoined))
            for _ in range(5):
                assert await place.knock(f"Bearer {token()}") == (503, None)
        await until(lambda: place.of(ChannelClosed))
        assert await place.knock(f"Bearer {token()}") == (101, None)
    await place.gateway.stop()
    assert place.gateway.refusals["TooManyWorkers"] == 5
    assert caplog.text.count("1 workers are connected: no more are accepted") == 1, "callers cannot fill the log"


async def test_a_deleted_job_turns_no_worker_of_the_one_that_has_its_name_away() -> None:
    """The new one's path may not be open yet, as when an operator starts: a worker that is refused would end."""
    cluster = ClusterCache()
    cluster.pod_event("ADDED", pod_of("u-old", "job-w0", "u0"))
    cluster.pod_event("ADDED", pod_of("u-new", "job-w1", "u1"))
    async with house() as place:
        await place.gateway.close(JOB, place.channels)

        async def uid_of(job: JobKey) -> str:
            return "u-new"

        deleted_jobs = DeletedJobs(cluster, place.gateway, TokenReviewer(place.server), uid_of)
        deleted_jobs.job_deleted(JOB, "u-old")
        await asyncio.sleep(0)  # its task opens the path
        assert await place.knock(f"Bearer {token(pod='job-w1', uid='u1')}") == (503, None)
        await deleted_jobs.stop()
