"""The signals with which a person stops a local run."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_signals(handler: Callable[[], None]) -> Iterator[None]:
    """Calls the handler for each of them, in the running loop; before and after, they do what they did.

    Signals that the caller has blocked are let in only while there is a loop to handle them.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handler)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handled in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handled)
