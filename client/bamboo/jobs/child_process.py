"""The other end of `bamboo.jobs.child`: starts such a process, hears it, and sees that it ends."""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from bamboo.jobs.channel import packed, received
from bamboo.jobs.child import Answered, Ask, ChildWork, Raised
from bamboo.jobs.errors import BambooError

END_SECONDS: Final = 60.0  # from SIGTERM to SIGKILL: a job that keeps its state may take its time
PRINTED_SECONDS: Final = 2.0  # for its last lines, once it has ended
TAIL_LINES: Final = 20


class ChildDied(BambooError):
    """The process that worked for this program ended without an answer, perhaps for want of memory."""


class ChildProcess:
    """A process that does some work, in a session of its own, so that Ctrl-C does not reach it.

    say: is called, in the loop, with each line that it prints.
    """

    def __init__(self, process: asyncio.subprocess.Process, say: Callable[[str], object]) -> None:
        self._process, self._say = process, say
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._printed = asyncio.create_task(self._read_lines())

    @classmethod
    async def start(cls, work: ChildWork, say: Callable[[str], object]) -> "ChildProcess":
        """Raises OSError if no process can be started."""
        first = packed(work)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "bamboo.jobs.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        child = cls(process, say)
        await child._write(first)
        return child

    async def send(self, message: object) -> None:
        """Sends it; to a process that has ended, nothing."""
        await self._write(packed(message))

    async def messages(self) -> AsyncIterator[Any]:
        """All that it sends until it ends."""
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError):
            while True:
                yield await received(self._process.stdout)

    async def close(self) -> str:
        """Lets it end, since nothing more is sent to it, and kills it if that takes too long. What it printed last."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
        finally:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            await asyncio.wait([self._printed], timeout=PRINTED_SECONDS)  # others may hold its standard error
            self._printed.cancel()
        return "\n".join(self._tail)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # what it said before it ended is still to be read
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def _read_lines(self) -> None:
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # longer than any line that a person reads
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            self._tail.append(text)
            with contextlib.suppress(OSError, ValueError):  # this program's own standard error is closed
                self._say(text)


async def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, called in a process of its own. Raises what it raises, and ChildDied."""
    child = await ChildProcess.start(Ask(function, arguments), print_error)
    answer: Answered | Raised | None = None
    try:
        async for message in child.messages():
            answer = message
    finally:
        if answer is None:
            child.terminate()
        tail = await child.close()
    if answer is None:
        raise ChildDied(f"the process that worked for this program ended without an answer{tail and f': {tail}'}")
    if isinstance(answer, Raised):
        raise answer.error
    return answer.value


def print_error(line: str) -> None:
    """A line for a person: what such a process warns of."""
    print(line, file=sys.stderr, flush=True)
