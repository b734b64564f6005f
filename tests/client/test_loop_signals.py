"""A signal at every place of an event loop's life has its effect once, and nothing is left half done."""

import asyncio
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from bamboo import loop_signals, stop_signals
from bamboo.stop_signals import STOP_SIGNALS

SECONDS = 60.0
PLACES = ("asyncio/", "bamboo/stop_signals.py", "bamboo/loop_signals.py", "contextlib.py", "test_loop_signals.py")


class Ended(Exception):
    """What the signal does outside of the loop, instead of SystemExit, which pytest would take for its own."""


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


@pytest.fixture
def _without_others() -> None:
    """What tests before this one have left is not complained of here, nor looked at whenever garbage is collected."""
    gc.collect()
    gc.freeze()


class Strike:
    """Raises a signal at the place of that number, as one would come there."""

    def __init__(self, at: int) -> None:
        self.at, self.places = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Strike | None":
        if not any(place in frame.f_code.co_filename for place in PLACES):
            return None
        self.places += 1
        if self.places == self.at:
            sys.settrace(None)
            signal.raise_signal(STOP_SIGNALS[self.at % len(STOP_SIGNALS)])
        return self


def struck(at: int, program: Callable[[], object]) -> tuple[bool, bool, list[str]]:
    """Whether the place was there, whether the program was ended by an exception, and what was complained of."""
    strike, complaints, ended = Strike(at), list[str](), False
    hook, sys.unraisablehook = sys.unraisablehook, lambda said: complaints.append(repr(said))
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                sys.settrace(strike)
                program()
            except Ended:
                ended = True
            finally:
                sys.settrace(None)
            gc.collect()
    finally:
        sys.unraisablehook = hook
    return strike.places >= at, ended, complaints + [str(one.message) for one in warned]


@pytest.mark.usefixtures("_without_others")
def test_wherever_a_signal_comes_it_is_taken_or_ends_the_program() -> None:
    """One of the two and not both; there is no place at which it is lost, or leaves something half done."""
    at, outcomes = 1, set()
    while True:
        calls, through = list[int](), list[int]()

        async def main(calls: list[int] = calls, through: list[int] = through) -> None:
            with loop_signals.taken(lambda: calls.append(1)):
                await asyncio.sleep(0)
            through.append(1)

        there, ended, complaints = struck(at, lambda main=main: loop_signals.run(main))
        if not there:
            break
        assert (len(calls), complaints) == (0 if ended else 1, []), f"at place {at}"
        outcomes.add((ended, bool(through)))
        if not ended:
            assert {signal.getsignal(number) for number in STOP_SIGNALS} == {end}
        for number in STOP_SIGNALS:
            signal.signal(number, end)
        at += 1
    assert at > 200
    # before the loop, taken in it, and after it: what is in the loop is always done to its end
    assert outcomes == {(True, False), (False, True), (True, True)}


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
    """The kernel gives it to any thread that does not block it."""

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
        asyncio.run(main())
    assert calls == [1]
