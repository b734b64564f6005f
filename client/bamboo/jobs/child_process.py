"""The parent's side of `bamboo.jobs.child`: starts the process, receives its messages, and ends it."""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from bamboo.jobs.channel import packed, received
from bamboo.jobs.child import Answered, Ask, ChildWork, Raised
from bamboo.jobs.errors import BambooError

END_SECONDS: Final = 60.0  # from SIGTERM to SIGKILL: a job may write a checkpoint meanwhile
PRINTED_SECONDS: Final = 2.0  # for the last lines of an ended process
TAIL_LINES: Final = 20


class ChildDied(BambooError):
    """The process that worked for this program ended without an answer, perhaps for lack of memory."""


class ChildProcess:
    """A process that does some work, in its own session, so that Ctrl-C does not reach it.

    say: called in the loop with each line that it prints.
    """

    def __init__(self, process: asyncio.subprocess.Process, say: Callable[[str], object]) -> None:
        self._process, self._say = process, say
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._printed = asyncio.create_task(self._read_lines())

    @classmethod
    async def start(cls, work: ChildWork, say: Callable[[str], object]) -> "ChildProcess":
        """Start the process. Raises OSError if that fails."""
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
        """Send a message, unless the process has ended."""
        await self._write(packed(message))

    async def messages(self) -> AsyncIterator[Any]:
        """Yield the messages of the process until it ends."""
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError):
            while True:
                yield await received(self._process.stdout)

    async def close(self) -> str:
        """Close its input and wait for its end, by force if it takes too long. Return the last lines it printed."""
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
        with contextlib.suppress(ConnectionError):  # messages sent before its end can still be read
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def _read_lines(self) -> None:
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # a line beyond the buffer's limit
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            self._tail.append(text)
            with contextlib.suppress(OSError, ValueError):  # this program's own standard error is closed
                self._say(text)


async def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own; return its result or raise its error. Raises ChildDied."""
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
    """Print a line of such a process to standard error."""
    print(line, file=sys.stderr, flush=True)
