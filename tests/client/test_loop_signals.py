"""Signals before and within an event loop, each of which takes effect once."""

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from bamboo import loop_signals, stop_signals
from bamboo.stop_signals import STOP_SIGNALS

SECONDS = 60.0


class Ended(Exception):
    """The exception that signals outside of the loop raise, instead of SystemExit, which would end pytest."""


def end(*_: object) -> None:
    raise Ended


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, end)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_cancels_what_runs_and_lets_it_close() -> None:
    closed = list[int]()

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(SECONDS)
        finally:
            await asyncio.sleep(0.01)
            closed.append(1)

    with pytest.raises(asyncio.CancelledError):
        loop_signals.run_until_stopped(main)
    assert closed == [1]


def test_a_signal_that_another_thread_gets_wakes_the_loop() -> None:
    """A signal wakes the loop though the kernel may deliver it to any thread that does not block it."""

    async def main() -> bool:
        came = asyncio.Event()
        with loop_signals.taken(came.set):
            other = threading.Timer(0.05, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
            other.start()
            await asyncio.wait_for(came.wait(), SECONDS)
            other.join()
        return True

    assert loop_signals.run(main)


def test_what_is_held_before_the_loop_is_taken_in_it() -> None:
    calls = list[int]()

    async def main() -> None:
        with loop_signals.taken(lambda: calls.append(1)):
            await asyncio.sleep(0)

    with stop_signals.held():
        signal.raise_signal(signal.SIGHUP)
        loop_signals.run(main)  # which holds signals within
    assert calls == [1]
