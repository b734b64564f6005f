"""The workers' port: refusals, limits, late workers and TLS."""

import asyncio
import contextlib
import json
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.control.protocol import ChannelClosed, Message, Received, Refused, Stop, WorkerJoined
from bamboo_core.serving.listener import ConnectionBounds
from bamboo_operator.auth.pod_tokens import PodIdentity
from bamboo_operator.auth.worker_gateway import ServingCertificate
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.jobs.late_workers import DeletedJobs, stopping_late_workers
from bamboo_operator.kube.objects import JobIdentity
from certificates import issue
from gateway_kit import JOB, House, house, talk, token
from opsim_kopf import pod_event
from waiting import in_time


async def test_a_worker_that_may_not_come_in_is_told_so_and_can_end() -> None:
    async with house() as place:
        heard = await talk(place, token(uid="u9"))
        assert heard[0] == Refused(reason="Unauthorized", message="job-w0 is not a running pod of this job")


async def test_a_worker_that_floods_its_channel_is_heard_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_core.control.server.MESSAGES_AT_ONCE", 10)
    monkeypatch.setattr("bamboo_core.control.server.MESSAGES_A_SECOND", 100.0)
    async with house() as place:
        async with place.greeted() as socket:
            began = time.monotonic()
            for _ in range(60):
                await socket.send_str('{"type":"Heartbeat","step":1}')
            await in_time(lambda: len(place.of(Received)) == 60)
            assert time.monotonic() - began > 0.45, "50 of them at 100 a second"
        await in_time(lambda: place.of(ChannelClosed))


def pod_of(job: str, name: str, uid: str) -> dict[str, Any]:
    """Return the pod of a running worker. job: the UID of its job."""
    owner = {"kind": "BambooJob", "uid": job, "controller": True}
    labels = {"bamboo.dev/job-name": JOB[1]}
    metadata = {"name": name, "namespace": JOB[0], "uid": uid, "labels": labels, "ownerReferences": [owner]}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}}


async def test_workers_that_live_on_when_their_job_is_over_are_told_so() -> None:
    """The gateway sends a late worker a Stop while `stopping_late_workers` runs, and answers 404 afterwards."""
    cluster = ClusterIndices()
    pod_event(cluster, "ADDED", pod_of("u-job", "job-w0", "u0"))
    async with house() as place:
        over = Stop(reason="JobOver", message="the job is over")
        async with (
            stopping_late_workers(JobIdentity(JOB, "u-job"), place.shared(cluster), over),
            place.greeted() as socket,
        ):
            assert json.loads((await socket.receive()).data) == {
                "type": "Stop",
                "reason": "JobOver",
                "message": "the job is over",
            }
        assert await place.knock(f"Bearer {token()}") == (404, None)


async def test_more_workers_than_there_are_descriptors_for_come_again_later(caplog: pytest.LogCaptureFixture) -> None:
    place = House()
    port = await place.gateway.start("127.0.0.1", 0, bounds=ConnectionBounds(unauthenticated=8, known=1))
    place.url = f"ws://127.0.0.1:{port}"
    place.gateway.open(JOB, place.channels)
    async with place.greeted():
        await in_time(lambda: place.of(WorkerJoined))
        for _ in range(5):
            assert await place.knock(f"Bearer {token()}") == (503, None)
    await in_time(lambda: place.of(ChannelClosed))
    assert await place.knock(f"Bearer {token()}") == (101, None)
    await place.gateway.stop()
    assert place.gateway.refusals["TooManyWorkers"] == 5
    assert caplog.text.count("1 workers are connected: no more are accepted") == 1, "callers cannot fill the log"


async def test_workers_of_a_deleted_job_are_stopped_and_workers_of_a_new_job_of_its_name_are_not() -> None:
    """While a new job's path is not open, its workers get 503 or 404 and try again; a Stop or a 403 would end them."""
    cluster = ClusterIndices()
    uids = {"u-old": "u0", "u-deleting": "u1", "u-new": "u2", "u-managed": "u3"}
    for number, (job, uid) in enumerate(uids.items()):
        pod_event(cluster, "ADDED", pod_of(job, f"job-w{number}", uid))
    async with house() as place:
        await place.gateway.close(JOB, place.channels)
        place.server.jobs = [{"uid": "u-deleting", "deletionTimestamp": "now"}, {"uid": "u-new"}, {"uid": "u-managed"}]
        deleted_jobs = DeletedJobs(place.shared(cluster), lambda job: job.uid == "u-managed")
        place.gateway.serve_closed_paths(deleted_jobs.channels_for)
        answers = []
        for number, uid in enumerate((*uids.values(), "u9")):
            said = token(pod=f"job-w{number}", uid=uid)
            place.server.good[said] = PodIdentity("team", f"job-w{number}", uid)
            answers.append((await place.knock(f"Bearer {said}"))[0])
        assert answers == [101, 101, 503, 404, 404]
        place.server.good.clear()
        assert await place.knock(f"Bearer {token()}") == (503, None), "the API server does not confirm this token"
        place.server.good[token()] = PodIdentity("team", "job-w0", "u0")
        assert await talk(place, token()) == [Stop(reason="JobDeleted", message="the job was deleted")]
        await deleted_jobs.stop()


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
    monkeypatch.setattr("bamboo_operator.auth.worker_gateway.POLL_SECONDS", 0.05)
    files = certificate(tmp_path)
    context = files.context()
    files.key.unlink()  # as while the files are swapped
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
