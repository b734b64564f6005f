"""Worker processes of a local run: the events of their end, their nodes and zones."""

import signal
from pathlib import Path

import pytest

from bamboo.local.fork_server import ForkServer
from bamboo.local.workers import LocalWorkers
from bamboo_core.control import protocol
from bamboo_core.control.protocol import WorkerJoined
from bamboo_core.coordinator.events import Tick
from bamboo_core.names import EXIT_FENCED


@pytest.fixture
def workers(tmp_path: Path) -> LocalWorkers:
    """Return local workers without processes, so that signals have no effect."""
    return LocalWorkers(ForkServer(lambda worker, code: None, tmp_path / "log"), per_node=1)


@pytest.mark.parametrize(
    ("code", "heard", "crashes"),
    [
        (0, 0, []),
        (EXIT_FENCED, EXIT_FENCED, []),
        (9, 9, ["w1 exited with code 9"]),
        (-signal.SIGSEGV, 128 + signal.SIGSEGV, ["w1 was killed by SIGSEGV"]),
        (-40, 168, ["w1 was killed by signal 40"]),  # a real-time signal, which has no name
        (None, None, []),
    ],
)
def test_one_that_ended_by_itself_says_how(
    workers: LocalWorkers, code: int | None, heard: int | None, crashes: list[str]
) -> None:
    lost = workers.ended("w1", code, taken=False, over=False)
    assert (lost.exit_code, lost.removed, workers.crashes) == (heard, False, crashes)


async def test_one_that_was_killed_here_has_not_ended_by_itself(workers: LocalWorkers) -> None:
    workers.kill("w1")
    workers.remove("w2")
    workers.forget_kills()
    ended = [workers.ended(worker, -signal.SIGKILL, taken=True, over=False) for worker in ("w1", "w3")]
    assert [lost.exit_code for lost in ended] == [None, 128 + signal.SIGKILL], "nobody here has killed w3"
    told_to_go = [workers.ended("w2", -signal.SIGTERM, taken=taken, over=False) for taken in (False, True)]
    assert [(lost.exit_code, lost.removed) for lost in told_to_go] == [(None, True), (None, False)]


def test_when_the_job_is_over_nobody_has_failed(workers: LocalWorkers) -> None:
    assert workers.ended("w1", 1, taken=False, over=True).exit_code is None
    assert workers.crashes == []


@pytest.mark.parametrize(
    ("per_node", "zones", "node", "lost_with_w2"),
    [(1, "abca", "", []), (2, "aabb", "node-1", ["w3"])],
)
def test_workers_of_a_node_are_in_one_zone_and_lost_together(
    per_node: int, zones: str, node: str, lost_with_w2: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, str] = {}
    pool = ForkServer(lambda worker, code: None, tmp_path / "log")
    monkeypatch.setattr(pool, "start", lambda worker, gate, *, zone, **_: started.update({worker: zone}))
    monkeypatch.setattr(ForkServer, "alive", property(lambda pool: tuple(started)))
    workers = LocalWorkers(pool, per_node)
    for _ in zones:
        workers.start((), "", "", None)
    assert started == {f"w{number}": f"zone-{zone}" for number, zone in enumerate(zones)}
    assert list(workers.lost_with("w2")) == lost_with_w2
    joined = [WorkerJoined(protocol.Hello(worker=one, host="h", port=1, zone="z")) for one in ("w3", "stranger")]
    located = [workers.located(one) for one in joined]
    assert isinstance(located[0], WorkerJoined)
    assert (located[0].hello.node, located[1:], workers.located(Tick())) == (node, joined[1:], Tick())
