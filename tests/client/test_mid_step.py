"""Preemptions in the middle of a step: whose turn it is, and that a worker waits until it may go on."""

import asyncio
import socket
from pathlib import Path

import pytest

from bamboo.local.fork_server import ForkServer
from bamboo.preemption.mid_step import MidStepPreemption, MidStepPreemptions
from bamboo.preemption.scheduling import Preemption, parse, steps_of
from folders import TASK_PATH

SECONDS = 60.0  # that a test waits for something
AIM = MidStepPreemption(worker="w1", action=Preemption(pick=0.0, step=5), step=5, after=2)


def begun(mid_step: MidStepPreemptions, worker: str, step: int) -> tuple[MidStepPreemption, ...]:
    mid_step.begins(worker, step)
    return mid_step.due(step)


def test_a_strike_comes_after_so_many_instructions_of_its_worker() -> None:
    mid_step = MidStepPreemptions()
    assert begun(mid_step, "w0", 5) == ()
    mid_step.add(AIM)
    assert mid_step.targets == {"w1"}
    assert [begun(mid_step, worker, 5) for worker in ("w1", "w0", "w0", "w1", "w0")] == [()] * 5
    assert begun(mid_step, "w1", 5) == (AIM,)  # two are done, and it is about to begin the third
    assert (begun(mid_step, "w1", 5), mid_step.targets) == ((), set())


def test_a_place_that_is_missed_is_struck_later() -> None:
    mid_step = MidStepPreemptions()
    mid_step.add(AIM)
    assert mid_step.due(5) == ()
    assert mid_step.due(6) == (AIM,)  # the step is over: the worker had no part in it any more
    begun(mid_step, "w1", 4)
    mid_step.add(AIM)
    assert begun(mid_step, "w1", 7) == (AIM,)


def test_workers_ask_in_the_steps_of_the_schedule() -> None:
    assert steps_of(parse(["random:1", "at:10:1", "at:4", "at:10:0:notice"])) == (3, 9)


def asking_worker(*, worker: str, gate: int, steps: list[int], **_: str | None) -> int:
    """Asks once for each step; its exit code is the number of answers."""
    with socket.socket(fileno=gate) as channel:
        for step in steps:
            channel.sendall(b"%d\n" % step)
            assert channel.recv(1) == b"\n"
    return len(steps)


async def test_the_pool_hears_the_question_and_the_worker_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)
    asked: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    ended: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue()
    pool = ForkServer(
        lambda worker, code: ended.put_nowait((worker, code)),
        tmp_path / "log",
        on_ask=lambda worker, step: asked.put_nowait((worker, step)),
    )
    await pool.open("--bare")
    try:
        for worker in ("w0", "w1"):
            pool.start(worker, (3, 7), url="", token="", zone="", main=f"{__name__}:asking_worker")
        async with asyncio.timeout(SECONDS):
            assert {await asked.get() for _ in range(2)} == {("w0", 3), ("w1", 3)}
            pool.proceed("w1")
            assert await asked.get() == ("w1", 7)
            pool.proceed("w1")
            assert await ended.get() == ("w1", 2)
            pool.signal("w0", 9)  # it never began what it asked for
            pool.proceed("w0")
            assert await ended.get() == ("w0", -9)
    finally:
        await pool.close()
    pool.proceed("w0")  # no complaint
