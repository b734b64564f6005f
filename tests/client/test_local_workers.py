"""The workers of a local run: what the coordinator hears of one that has ended."""

import signal
from pathlib import Path

import pytest

from bamboo.local.fork_server import ForkServer
from bamboo.local.workers import LocalWorkers
from bamboo_core.names import EXIT_FENCED


@pytest.fixture
def workers(tmp_path: Path) -> LocalWorkers:
    """None of which has a process, so that signals go nowhere."""
    return LocalWorkers(ForkServer(lambda worker, code: None, tmp_path / "log"), per_node=1)


@pytest.mark.parametrize(
    ("code", "heard", "crashes"),
    [
        (0, 0, []),
        (EXIT_FENCED, EXIT_FENCED, []),
        (9, 9, ["w1 exited with code 9"]),
        (-signal.SIGSEGV, 128 + signal.SIGSEGV, ["w1 was killed by SIGSEGV"]),
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
