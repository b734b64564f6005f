"""The process that a Python program starts for a job, a search or a simulation: `python -m bamboo.jobs.child`.

It has its own signals and main thread, and forks, which a notebook's process could not bear. It ends with the program,
however that ends, because its standard input is then closed. Messages are pickled: both ends are the same program of
the same user, so they trust each other.
"""

import contextlib
import os
import pickle
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bamboo import stop_signals
from bamboo.jobs.errors import BambooError

HEAD: Final = struct.Struct(">Q")  # the length of a message to the program, which reads it in an event loop


class Channel:
    """The process's end of its channel to the program. Any thread may send."""

    def __init__(self) -> None:
        """Take over standard input and output; from now on, prints go to standard error."""
        self._reading, self._writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message. Raises BrokenPipeError if the program has ended."""
        body = pickle.dumps(message)
        with self._lock:
            self._writing.write(HEAD.pack(len(body)) + body)
            self._writing.flush()

    def messages(self) -> Iterator[Any]:
        """Yield messages until the program closes its end."""
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the latter in the middle of a message
            while True:
                yield pickle.load(self._reading)


class ChildWork(Protocol):
    """The work of such a process, sent as its first message. It returns the result, or raises BambooError."""

    def __call__(self, channel: Channel) -> Any: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message of such a process: the result of its work, or its error."""

    result: Any = None
    error: BambooError | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of a function of this package."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, channel: Channel) -> Any:
        threading.Thread(target=_end_with_program, args=(channel,), daemon=True).start()
        return self.function(*self.arguments)


def _end_with_program(channel: Channel) -> None:
    for _ in channel.messages():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Do the work that the program sends, and send its end."""
    stop_signals.end_by_exception()
    channel = Channel()
    work: ChildWork = next(channel.messages())
    try:
        ended = Ended(result=work(channel))
    except BambooError as error:
        ended = Ended(error=error)
    with contextlib.suppress(BrokenPipeError):
        channel.send(ended)


if __name__ == "__main__":
    from bamboo.jobs import child  # its classes are pickled by this name

    child.main()
