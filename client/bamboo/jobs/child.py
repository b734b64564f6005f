"""The process that a Python program starts for a job, a search or a simulation: `python -m bamboo.jobs.child`.

It has its own signals and main thread, and forks, which a notebook's process could not bear. It ends with the program,
however that ends, because its standard input is then closed.
"""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from bamboo import stop_signals
from bamboo.jobs.channel import Channel


class ChildWork(Protocol):
    """The work of such a process, sent as its first message."""

    def __call__(self, channel: Channel) -> None: ...


@dataclass(frozen=True, slots=True)
class Answered:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    error: Exception


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of a function of this package, whose result or error is sent back."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, channel: Channel) -> None:
        threading.Thread(target=_end_with_program, args=(channel,), daemon=True).start()
        try:
            answer: Answered | Raised = Answered(self.function(*self.arguments))
        except Exception as error:
            answer = Raised(error)
        channel.send(answer)


def _end_with_program(channel: Channel) -> None:
    for _ in channel.messages():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    stop_signals.end_by_exception()
    channel = Channel.of_standard_streams()
    work: ChildWork = channel.receive()
    work(channel)


if __name__ == "__main__":
    main()
