"""The watch on a cloud's metadata endpoint: how it is asked, and that a notice reaches the coordinator."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bamboo_core.coordinator.events import Interrupted, Outcome
from bamboo_trainer.worker import cloud_watch
from bamboo_trainer.worker.agent import WorkerSettings
from bamboo_trainer.worker.cloud_notices import Cloud, CloudNotice, Wanted
from bamboo_trainer.worker.cloud_watch import Aws, Azure, Http, PollIntervals, Watcher
from bamboo_trainer.worker.launch.process import main as run_worker
from cloud_kit import (
    ACTION,
    MAINTENANCE,
    PREEMPTED,
    REBALANCE,
    AwsEndpoint,
    AzureEndpoint,
    Endpoint,
    GcpEndpoint,
    event,
)
from folders import TASK_PATH
from manifest_kit import bamboojob, gpt_task, training
from processes import Processes

ENVIRONMENT = "BAMBOO_TEST_METADATA"


def watched_worker(**arguments: str) -> int:
    """A worker that watches an endpoint of its own: the address in the environment, and its name as the path."""
    url = f"{os.environ[ENVIRONMENT]}/{arguments['worker']}"
    arguments.pop("trace", None)
    return run_worker(**arguments, settings=WorkerSettings(metadata=Wanted(cloud=Cloud.GCP, url=url)))


LONG = 60.0  # seconds that no test waits to the end of


FAST = PollIntervals(aws=0.02, azure=0.02, gcp=0.02, answer=LONG, change=LONG, first=LONG)


LOG = "bamboo_trainer.worker.cloud_watch"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_watch, "CLOSE_SECONDS", LONG)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def watching(
    endpoint: Endpoint, cloud: Cloud | None, pace: PollIntervals = FAST, **more: Any
) -> AsyncIterator[list[CloudNotice]]:
    """The notices that come; at the end nothing may be left of the watcher."""
    notices: list[CloudNotice] = []
    watcher = Watcher(Wanted(cloud=cloud, url=endpoint.url, **more), notices.append, pace)
    before = set(threading.enumerate())
    watcher.start()
    (thread,) = set(threading.enumerate()) - before
    try:
        yield notices
    finally:
        began = time.monotonic()
        await asyncio.to_thread(watcher.close)
        watcher.close()
        assert time.monotonic() - began < LONG / 2  # it waits neither for an answer nor to the end of its patience
        assert not thread.is_alive()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == LOG and r.levelno >= logging.WARNING]


def in_a_minute() -> str:
    return datetime.fromtimestamp(time.time() + 60, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_aws_is_asked_again_with_a_new_token_when_the_old_one_expires(caplog: pytest.LogCaptureFixture) -> None:
    async with AwsEndpoint() as aws, watching(aws, Cloud.AWS) as notices:
        await until(lambda: aws.asked[f"GET {ACTION}"] > 2)
        assert notices == []
        aws.expired = aws.tokens  # as after six hours
        said = time.time()
        aws.says[ACTION] = json.dumps({"action": "terminate", "time": in_a_minute()})
        await until(lambda: notices)
        waited = time.time() - said
        before = aws.asked[f"GET {ACTION}"]
        await until(lambda: aws.asked[f"GET {ACTION}"] > before + 2)
        assert [n.source for n in notices] == ["AwsSpotInterruption"]
        assert 59 - waited < notices[0].seconds <= 60  # AWS names whole seconds
        assert aws.tokens <= 4  # two at most ask at the same time
    assert len(warnings(caplog)) == 1


async def test_a_late_refusal_of_the_old_token_does_not_cost_the_new_one() -> None:
    class Late(AwsEndpoint):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            answer = await super().answer(request)
            if request.path == REBALANCE:
                await renewed.wait()
            return answer

    renewed = asyncio.Event()
    async with Late() as endpoint, aiohttp.ClientSession() as session:
        ask_action, ask_rebalance = (s.look for s in Aws(Http(session, endpoint.url), FAST, rebalance=True).sources)
        assert await ask_action() is None
        endpoint.expired = endpoint.tokens
        late = asyncio.ensure_future(ask_rebalance())
        await until(lambda: endpoint.asked[f"GET {REBALANCE}"])
        assert await ask_action() is None
        renewed.set()
        assert await late is None
        assert endpoint.tokens == 2


@pytest.mark.parametrize("rebalance", [False, True])
async def test_a_recommendation_is_only_logged_unless_asked_for(
    rebalance: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with AwsEndpoint() as aws, watching(aws, Cloud.AWS, rebalance=rebalance) as notices:
        aws.says[REBALANCE] = json.dumps({"noticeTime": in_a_minute()})
        await until(lambda: warnings(caplog))
        await until(lambda: aws.asked[f"GET {REBALANCE}"] > 3)
        assert len(notices) == rebalance
    assert "rebalance recommendation" in warnings(caplog)[0]
    assert ("not acted upon" in warnings(caplog)[0]) != rebalance


async def test_gcp_is_asked_to_wait_for_a_change() -> None:
    async with GcpEndpoint() as gcp, watching(gcp, Cloud.GCP, gcp_seconds=120.0) as notices:
        await until(lambda: gcp.waiting == 2)
        assert gcp.waited[0].keys() == {"wait_for_change", "last_etag", "timeout_sec"}
        asked = gcp.asked.total()
        await asyncio.sleep(0.2)
        assert gcp.asked.total() == asked  # it waits, and is not asked meanwhile
        await gcp.say(PREEMPTED, "TRUE")
        await until(lambda: notices)
        assert (notices[0].source, notices[0].seconds) == ("GcpPreempted", 120.0)
        await until(lambda: gcp.waiting == 2)
        assert len(notices) == 1


async def test_a_wait_that_ends_without_a_change_is_begun_again() -> None:
    pace = PollIntervals(gcp=0.01, answer=0.5, change=0.0)
    async with GcpEndpoint() as gcp, watching(gcp, Cloud.GCP, pace) as notices:
        await until(lambda: len(gcp.waited) > 6)
        assert notices == []


async def test_gcp_is_asked_again_after_a_503(caplog: pytest.LogCaptureFixture) -> None:
    async with GcpEndpoint() as gcp:
        gcp.trouble = web.Response(status=503)
        async with watching(gcp, Cloud.GCP, PollIntervals(gcp=0.7)) as notices:
            await until(lambda: gcp.asked.total() >= 2)
            gcp.trouble = None
            await gcp.say(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
            await until(lambda: notices)
            assert notices[0].source == "GcpMaintenance"
    assert len(warnings(caplog)) == 1


async def test_a_notice_that_is_withdrawn_and_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    async with AzureEndpoint() as azure, watching(azure, Cloud.AZURE) as notices:
        azure.events = [event()]
        await until(lambda: notices)
        azure.trouble = web.Response(status=503)  # that is no withdrawal
        before = azure.asked.total()
        await until(lambda: azure.asked.total() > before + 4)
        assert not any("withdrawn" in text for text in warnings(caplog))
        azure.trouble, azure.events = None, []
        await until(lambda: any("AzurePreempt is withdrawn" in text for text in warnings(caplog)))
        azure.events = [event()]
        await until(lambda: len(notices) == 2)
        azure.events = [event(EventStatus="Started", NotBefore="")]
        await until(lambda: len(notices) == 3)
        assert notices[2].seconds == 5.0
        assert azure.asked["GET /metadata/instance/compute/name"] == 1


async def test_azure_may_take_long_for_its_first_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def name(_: Azure) -> str:
        return "vmss_3"

    monkeypatch.setattr(Azure, "name", name)  # it has the short time to be answered in
    pace = PollIntervals(azure=LONG, answer=0.3, first=LONG)
    async with AzureEndpoint() as azure:
        azure.slow_first = 2 * pace.answer
        azure.events = [event("Preempt", "vmss_4"), event("Terminate", "vmss_4", "vmss_3", EventId="b")]
        async with watching(azure, Cloud.AZURE, pace) as notices:
            await until(lambda: notices)
            assert azure.asked["GET /metadata/scheduledevents"] == 1
            assert notices[0].source == "AzureTerminate"
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("asked_for", "left"), [(True, True), (True, False), (False, True)])
async def test_azure_is_told_only_when_the_worker_has_left(asked_for: bool, left: bool) -> None:
    async with AzureEndpoint() as azure:
        azure.events = [event(EventId="mine"), event("Preempt", "vmss_3", "vmss_4", EventId="ours")]
        wish = Wanted(cloud=Cloud.AZURE, url=azure.url, acknowledge=asked_for)
        notices: list[CloudNotice] = []
        watcher = Watcher(wish, notices.append, FAST)
        watcher.start()
        await until(lambda: notices)
        assert azure.acknowledged == []
        await asyncio.to_thread(watcher.close, left)
        expected = [{"StartRequests": [{"EventId": "mine"}]}] if asked_for and left else []
        assert azure.acknowledged == expected


@pytest.mark.parametrize("cloud", list(Cloud))
@pytest.mark.parametrize(
    "trouble",
    [
        web.Response(status=503),
        web.Response(status=404),
        web.Response(status=200, text="<html>" + "x" * 5000),
        web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        5.0,
    ],
    ids=["503", "404", "garbage", "redirect", "slow"],
)
async def test_what_goes_wrong_is_said_once(
    cloud: Cloud, trouble: web.Response | float, caplog: pytest.LogCaptureFixture
) -> None:
    pace = PollIntervals(aws=0.01, azure=0.01, gcp=0.01, answer=0.05, change=0.1, first=0.1)
    async with Endpoint() as endpoint:
        endpoint.trouble = trouble
        async with watching(endpoint, cloud, pace) as notices:
            await until(lambda: warnings(caplog))
            asked = endpoint.asked.total()
            await until(lambda: endpoint.asked.total() > asked + 4)
            assert notices == []
    assert len(warnings(caplog)) == 1
    assert "the metadata endpoint does not say" in warnings(caplog)[0]


async def test_an_endpoint_that_nobody_serves_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with Endpoint() as endpoint:
        pass
    async with watching(endpoint, Cloud.AWS):
        await until(lambda: warnings(caplog))
    assert len(warnings(caplog)) == 1


async def test_an_endless_answer_is_cut_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_trainer.worker.cloud_watch.MAX_BYTES", 1000)
    async with Endpoint() as endpoint:
        endpoint.trouble = web.Response(status=200, text="x" * 2000)
        async with watching(endpoint, Cloud.AWS):
            await until(lambda: warnings(caplog))
    assert "more than 1000 bytes" in warnings(caplog)[0]


@pytest.mark.parametrize(("cloud", "kind"), [("aws", AwsEndpoint), ("gcp", GcpEndpoint), ("azure", AzureEndpoint)])
async def test_auto_finds_the_cloud(cloud: str, kind: type[Endpoint], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with kind() as endpoint, watching(endpoint, None):
        await until(lambda: f"watching the metadata endpoint of {cloud} for notices" in caplog.text)
        await until(lambda: endpoint.asked.total() > 5)
    assert warnings(caplog) == []


async def test_auto_finds_no_cloud(caplog: pytest.LogCaptureFixture) -> None:
    async with Endpoint() as endpoint, watching(endpoint, None):
        await until(lambda: warnings(caplog))
        assert endpoint.asked.total() == 3
        await until(lambda: not [t for t in threading.enumerate() if t.name == "bamboo-metadata"])
    assert warnings(caplog) == ["no cloud's metadata endpoint answers, so none is watched for notices"]


def test_a_watcher_that_never_started_closes() -> None:
    Watcher(Wanted(cloud=Cloud.AWS), print).close()


def job_manifest() -> dict[str, Any]:
    return bamboojob(
        task=gpt_task(dModel=16),
        training=training(1_000_000, 8, 2),
        topology={"stages": 2, "pipelines": 1},
        redundancy={"mode": "LazyForward"},
        standby={"workers": 1},
    )


async def test_a_worker_with_both_kinds_of_notice_leaves_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's notice comes first, and then the SIGTERM that follows it: the second one must not cut the first."""
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)
    async with GcpEndpoint() as gcp:
        monkeypatch.setenv(ENVIRONMENT, gcp.url)
        chosen: list[str] = []
        tasks: list[asyncio.Task[None]] = []

        def decide(job: Processes) -> None:
            if job.state.step >= 3 and not chosen and job.state.plan:
                chosen.append(job.owner(0, 1))
                tasks.append(asyncio.create_task(gcp.say(PREEMPTED, "TRUE", prefix=f"/{chosen[0]}")))
            noticed = [e for e in job.emitted if e.reason == "NoticeReceived"]
            if noticed and not job.acted:
                job.signal(chosen[0], signal.SIGTERM)
            if job.acted and chosen[0] in job.exits and not job.finish:
                job.queue.put_nowait(Interrupted())

        job = await Processes(job_manifest(), tmp_path, main="test_cloud_watch:watched_worker", decide=decide).run()
        await asyncio.gather(*tasks)
    noticed = [e.message for e in job.emitted if e.reason == "NoticeReceived"]
    assert noticed == [f"{chosen[0]} will be taken away in 30 s"]
    assert any(e.reason == "WorkerLeft" for e in job.emitted)
    assert job.exits[chosen[0]] == 0
    assert job.finish
    assert job.finish.outcome is Outcome.INTERRUPTED
    assert "GcpPreempted: this node is being reclaimed by GCP" in (tmp_path / "workers.log").read_text()
