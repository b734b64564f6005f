"""Worker processes on this machine, started by the trainer's fork server.

The fork server ends all processes that workers have started. If it is killed, this process, as a subreaper, becomes
the parent of those processes and ends them.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bamboo_core.names import ENV_LAUNCH
from bamboo_core.orphans import Orphans, adopt, carries, children
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import shortened

logger = logging.getLogger(__name__)

LAUNCHER = "bamboo_trainer.worker.launcher"
READY_SECONDS = 1200.0  # for importing torch and the task from a cold disk, on a busy machine
CALL_SECONDS = 7200.0  # for a call, however large its data and however busy the machine
TOLD_SECONDS = 30.0  # between two reports of a long wait
CLOSE_SECONDS = 5.0  # in which the launcher ends the workers and itself
LOOK_SECONDS = 0.05  # between two looks at processes that a killed launcher has left
LINE_BYTES = 64 << 20
TAIL_BYTES = 64 << 10  # of the log, which may be huge
MOST_OF_LINE = 500  # characters that `tail` returns of a line


class ForkServerError(Exception):
    """Error if the launcher does not start, has ended or survives a kill, or a call fails; the text is for the user."""


class ForkServer:
    """Client of the trainer's fork server (the launcher), which forks workers and calls functions in new processes.

    The event loop calls on_exit, on_ask and on_wait. on_exit: takes (worker, exit code); the code is negative for a
    signal, None if the launcher ended. on_ask: takes (worker, step) when a worker asks to begin a forward or backward
    in a step of its `gate` (see `start`); the worker waits until `proceed`. None: it proceeds at once. on_wait: takes a
    sentence every TOLD_SECONDS while the launcher starts or a call runs.

    log: the file that receives all output of launcher and workers. imports: modules that the launcher loads before
    forking. folders: searched first, in this order, for the task's modules, but not for Bamboo's modules and their
    imports. scratch: an existing folder for temporary files of launcher and workers; None: the system's folder.
    """

    _launchers: ClassVar[int] = 0  # running launchers of this process, which adopts orphans while there are any

    def __init__(
        self,
        on_exit: Callable[[WorkerId, int | None], None],
        log: Path,
        *,
        imports: Sequence[str] = (),
        folders: Sequence[Path] = (),
        scratch: Path | None = None,
        on_ask: Callable[[WorkerId, int], None] | None = None,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._on_exit = on_exit
        self._on_ask = on_ask or (lambda worker, step: self.proceed(worker))
        self._on_wait = on_wait
        self._log = log
        self._imports, self._folders = imports, folders
        self._scratch = scratch
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()  # or the launcher has ended before it was ready
        self._ended = False
        self._pids: dict[WorkerId, int | None] = {}  # None until the launcher reports it
        self._early: dict[WorkerId, int] = {}  # signals for workers whose pid is not known yet
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._importing = ""  # the module that the launcher imports, before it is ready
        self._number = 0
        self._mark = secrets.token_hex(8)  # in the environment of all descendants of the launcher

    @property
    def alive(self) -> tuple[WorkerId, ...]:
        return tuple(self._pids)

    def pid(self, worker: WorkerId) -> int | None:
        return self._pids.get(worker)

    async def open(self, *extra: str) -> None:
        """Start the launcher and wait until it can fork. extra: more arguments. Raises ForkServerError, OSError."""
        arguments = [item for module in self._imports for item in ("--import", module)]
        arguments += [item for folder in self._folders for item in ("--folder", str(folder.absolute()))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", ENV_LAUNCH: self._mark}
        if self._scratch is not None:
            temporary = self._scratch / "tmp"
            temporary.mkdir(exist_ok=True)
            environment["TMPDIR"] = str(temporary)
        ForkServer._launchers += 1
        adopt()
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", LAUNCHER, *arguments, *extra),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES,
                env=environment,
                process_group=0,  # Ctrl-C reaches this process only, which then ends the workers in order
            )
        self._reader = asyncio.create_task(self._read(self._process))
        if problem := await self._not_ready(self._process):
            await self.close()
            raise ForkServerError(
                f"the launcher of workers did not start{problem}: {self.tail() or 'it printed nothing'}"
            )

    async def _not_ready(self, process: asyncio.subprocess.Process) -> str:
        """Wait until the launcher is ready and return ""; if it fails, return words to follow "did not start"."""
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await self._outlast(ready, READY_SECONDS, "the launcher of workers has been starting")
        except TimeoutError:
            return f" within {READY_SECONDS:.0f} s{self._imports_now(' when it imported')}"
        finally:
            ready.cancel()
        if self._running():
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
        return f": it {exit_detail(process.returncode)}" if process.returncode is not None else ": it has ended"

    def _imports_now(self, words: str) -> str:
        """Return `words` followed by the module that the launcher is importing; "" if it imports none."""
        return f"{words} {self._importing}" if self._importing and not self._ready.is_set() else ""

    async def _outlast(self, done: asyncio.Future[Any], seconds: float, text: str) -> None:
        """Wait for the future, reporting to `on_wait` every TOLD_SECONDS. Raises TimeoutError after `seconds`."""
        waited = 0.0
        while not (await asyncio.wait([done], timeout=TOLD_SECONDS))[0]:
            waited += TOLD_SECONDS
            if waited >= seconds:
                raise TimeoutError
            self._on_wait(f"{text} for {waited:.0f} s{self._imports_now(': it imports')}; Ctrl-C ends it")

    def start(self, worker: WorkerId, gate: Sequence[int] = (), **arguments: str | None) -> None:
        """Fork a worker. Raises ForkServerError if the launcher is gone.

        gate: the steps in which the worker asks before each forward and backward. arguments: passed to the worker.
        """
        assert worker not in self._pids, worker
        self._pids[worker] = None
        self._tell(op="start", worker=worker, gate=list(gate), **arguments)

    def proceed(self, worker: WorkerId) -> None:
        """Let a worker that waits after `on_ask` go on. Does nothing if the worker is gone."""
        self.signal(worker, signal.SIGUSR1)

    def signal(self, worker: WorkerId, number: int) -> None:
        """Send a signal to a worker, unless it is gone. While it starts, keep one signal: SIGKILL or the last one."""
        if worker not in self._pids:
            return
        if (pid := self._pids[worker]) is None:
            if self._early.get(worker) != signal.SIGKILL:
                self._early[worker] = number
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    async def call(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """Call "module:function" in a new process; return its result. Raises ForkServerError on failure or timeout."""
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._tell(op="call", id=number, function=function, arguments=arguments)
            await self._outlast(future, CALL_SECONDS, f"{function} has been running")
            return future.result()
        except TimeoutError:
            raise ForkServerError(f"{function} did not return within {CALL_SECONDS:.0f} s") from None
        finally:
            del self._calls[number]

    async def close(self) -> None:
        """Kill all workers and the launcher, and wait until they are gone. May be called twice.

        Log processes of workers that remain. Raises ForkServerError if the launcher survives a kill.
        """
        if (process := self._process) is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if not self._ready.is_set():
            _kill(process)  # it is still importing and has no child yet
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
        except TimeoutError:
            _kill(process)
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await process.wait()
            except TimeoutError:
                stays = f"process {process.pid}, the launcher of workers, is still there {CLOSE_SECONDS:g} s after"
                raise ForkServerError(f"{stays} it was killed") from None
        if self._reader is not None:
            await self._reader
        self._process = None

    def tail(self, lines: int = 15) -> str:
        """Return the log's last lines, each shortened, from its last TAIL_BYTES; "" if it cannot be read."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(-min(TAIL_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            text = log.read(TAIL_BYTES).decode(errors="replace")
            return "\n".join(shortened(line, MOST_OF_LINE) for line in text.splitlines()[-lines:])
        return ""

    def _running(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self._ended

    def _tell(self, **command: Any) -> None:
        if self._process is None or not self._running():
            raise ForkServerError("the launcher of workers has ended")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._hear(json.loads(line))
        self._ended = True
        self._ready.set()
        workers = {pid for pid in self._pids.values() if pid is not None}
        for worker in self.alive:
            self._exited(worker, None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ForkServerError("the launcher of workers has ended"))
        await process.wait()
        await self._end_orphans(process.pid, workers)
        ForkServer._launchers -= 1
        adopt(adopts=ForkServer._launchers > 0)

    async def _end_orphans(self, launcher: int, workers: set[int]) -> None:
        """End the processes of an ended launcher; wait up to CLOSE_SECONDS until they and `workers` (pids) are gone."""
        orphans, late = Orphans(), time.monotonic() + CLOSE_SECONDS
        left: set[int] = set()
        while time.monotonic() < late:
            here = children()
            found = {pid for pid, group in here.items() if group == launcher or carries(pid, ENV_LAUNCH, self._mark)}
            left = (left | found) & here.keys()
            orphans.end(left, time.monotonic())
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not left and not any(map(_exists, workers)):
                return
            await asyncio.sleep(LOOK_SECONDS)
        logger.warning("processes that workers have started are still there: %s", sorted(left))

    def _hear(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self._ready.set()
            case "importing":
                self._importing = event["module"]
            case "started":
                worker = event["worker"]
                if worker in self._pids:
                    self._pids[worker] = event["pid"]
                    if (number := self._early.pop(worker, None)) is not None:
                        self.signal(worker, number)
            case "asks" if event["worker"] in self._pids:
                self._on_ask(event["worker"], event["step"])
            case "exited":
                self._exited(event["worker"], event["code"])
            case "result" if (future := self._calls.get(event["id"])) is not None and not future.done():
                if "error" in event:
                    future.set_exception(ForkServerError(str(event["error"])))
                else:
                    future.set_result(event["value"])
            case "error":
                logger.error("the launcher of workers: %s", event["message"])

    def _exited(self, worker: WorkerId, code: int | None) -> None:
        if worker in self._pids:
            del self._pids[worker]
            self._early.pop(worker, None)
            self._on_exit(worker, code)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another process has the number by now
        return False
    return True


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def exit_detail(code: int | None) -> str:
    """Describe how a process ended: "was killed by SIGKILL". code: negative for a signal; None: its launcher ended."""
    if code is None:
        return "ended with its launcher"
    if code < 0:
        known = -code in signal.Signals.__members__.values()
        return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"exited with code {code}"
