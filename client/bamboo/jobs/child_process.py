"""The parent's side of `bamboo.jobs.child`: starts the process, receives its messages, and ends it."""

import asyncio
import contextlib
import pickle
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

from bamboo.jobs.child import HEAD, Ask, ChildWork, Ended
from bamboo.jobs.errors import BambooError

T = TypeVar("T")
END_SECONDS: Final = 60.0  # from SIGTERM to SIGKILL: a job may write a checkpoint meanwhile
PRINTED_SECONDS: Final = 2.0  # for the last lines of an ended process
TAIL_LINES: Final = 20


class ChildDied(BambooError):
    """The process that worked for this program ended without an answer, perhaps for lack of memory."""


class ChildProcess:
    """A process that does some work, in its own session, so that Ctrl-C does not reach it.

    What it prints goes to this program's standard error.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._printed = asyncio.create_task(self._read_lines())

    @classmethod
    async def start(cls, work: ChildWork) -> "ChildProcess":
        """Start the process. Raises OSError if that fails."""
        first = pickle.dumps(work)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "bamboo.jobs.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        child = cls(process)
        await child._write(first)
        return child

    async def send(self, message: object) -> None:
        """Send a message, unless the process has ended."""
        await self._write(pickle.dumps(message))

    async def result(self, take: Callable[[Any], Awaitable[None]]) -> Any:
        """Return the result of the work when the process has ended. take: called with each message before.

        Raises the work's BambooError, and ChildDied if the process ends without either.
        """
        ended: Ended | None = None
        try:
            async for message in self._messages():
                if isinstance(message, Ended):
                    ended = message
                else:
                    await take(message)
        finally:
            if ended is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
            tail = await self._close()
        if ended is None:
            why = "a process of this program ended without an answer, perhaps for want of memory"
            raise ChildDied(f"{why}\n\n{tail}" if tail else why)
        if ended.error is not None:
            raise ended.error
        return ended.result

    async def _messages(self) -> AsyncIterator[Any]:
        assert self._process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = HEAD.unpack(await self._process.stdout.readexactly(HEAD.size))
                yield pickle.loads(await self._process.stdout.readexactly(size))

    async def _close(self) -> str:
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
                print(text, file=sys.stderr, flush=True)


async def ask(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own, and return its result. Raises its BambooError, or ChildDied."""

    async def take(message: Any) -> None:
        raise AssertionError(message)

    child = await ChildProcess.start(Ask(function, arguments))
    result: T = await child.result(take)
    return result
