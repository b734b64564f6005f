"""The fork server, which imports torch once and then forks workers, so that a new worker starts in milliseconds.

python -P -m bamboo_trainer.worker.launcher [--bare] [--import MODULE]... [--folder FOLDER]...

One thread, one loop. JSON lines on stdin:

    {"op": "start", "worker": W, "url": .., "token": .., "zone": .., "trace": .., "main": ".."}
    {"op": "call", "id": I, "function": "module:function", "arguments": {..}}

and on stdout: {"event": "importing", "module": M} while it starts, {"event": "ready"}, then started (worker, pid),
exited (worker, code; negative: a signal), result (id, value | error), error (message) and asks (worker, step): a worker
that was started with "gate": [STEP, ..] is about to begin a forward or backward of one of these steps, and waits for
SIGUSR1. When stdin ends or SIGTERM comes, the launcher kills and reaps every child.

Children belong to the launcher's process group and die with the launcher, even if it is killed. Processes that a child
has started end with the child, even in other sessions: each child adopts its orphans, and the launcher adopts those of
an ended child.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

from bamboo_core.complaints import system_reason
from bamboo_core.orphans import Orphans, adopt, children, end_with
from bamboo_core.text import one_line

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it makes the first tensor


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Keep Python's garbage collector from traversing the objects that imports in this context create, now and later.

    torch makes half a million objects. Traversing them takes a second of a worker's start, and later, at each full
    collection, a fifth of a second in the middle of a step.

    Also let torch ask for huge pages for tensors from 2 MiB on, unless the environment sets HUGE_PAGES: the kernel
    provides new memory in pages, and providing small pages takes ten times as long as writing to them.
    """
    os.environ.setdefault(HUGE_PAGES, "1")
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


MODULES = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it: a second of work, and 60 MB, in each worker otherwise
    "aiohttp",
    "safetensors.torch",
    "bamboo_trainer.worker.process",
)
WORKER_MAIN = "bamboo_trainer.worker.process:main"
CHUNK = 1 << 16
WAIT_SECONDS = 0.01  # for children that have been killed
LOOK_SECONDS = 0.1  # between two looks at orphans that were asked to end
END_SECONDS = 3.0  # for all children, when the launcher ends; ForkServer.close() waits longer


class _Child(NamedTuple):
    """A forked child: a worker, or a call in progress. name: the worker, or the call's id. answer: the descriptor of a
    file for a call's answer; None for a worker.
    """

    name: Any
    answer: int | None


class Launcher:
    """The main loop of the fork server. commands, events: file descriptors."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands = commands
        self._events = events
        self._tell = partial(_tell, events)
        self._partial = b""
        self._children: dict[int, _Child] = {}  # by process
        self._stopping = False
        self._orphans = Orphans()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        self._asked, self._asking = os.pipe()  # workers write their questions to it

    def run(self) -> None:
        """Run until the commands end, nobody reads the events, or SIGTERM comes; then end all children."""
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        adopt()
        self._selector.register(self._commands, selectors.EVENT_READ, self._read_commands)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        self._selector.register(self._asked, selectors.EVENT_READ, self._read_questions)
        try:
            self._tell(event="ready")
            while not self._stopping:
                for key, _ in self._selector.select(LOOK_SECONDS if self._orphans else None):
                    key.data()
                if self._orphans:
                    self._end_orphans()
        except BrokenPipeError:  # nobody reads the events any more
            pass
        finally:
            self._kill_all()

    def _on_term(self, *_: object) -> None:
        self._stopping = True

    def _read_commands(self) -> None:
        data = os.read(self._commands, CHUNK)
        if not data:
            self._stopping = True
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            try:
                self._obey(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                self._tell(event="error", message=f"bad command {line[:200]!r}: {error!r}")

    def _read_questions(self) -> None:
        for line in os.read(self._asked, CHUNK).splitlines():  # none is cut, as each is short and written at once
            worker, step = json.loads(line)
            self._tell(event="asks", worker=worker, step=step)

    def _obey(self, command: dict[str, Any]) -> None:
        match command["op"]:
            case "start":
                self._start(command)
            case "call":
                self._call(command["id"], command["function"], command["arguments"])
            case other:
                raise ValueError(f"there is no op {other!r}")

    def _start(self, command: dict[str, Any]) -> None:
        worker, main = command["worker"], command.get("main") or WORKER_MAIN
        arguments = {k: command[k] for k in ("worker", "url", "token", "zone")}
        arguments["trace"] = command.get("trace")
        if steps := command.get("gate"):
            arguments |= {"gate": self._asking, "steps": steps}
        try:
            pid = self._fork(lambda: int(pkgutil.resolve_name(main)(**arguments)), worker)
        except OSError as error:
            print(f"launcher: cannot start {worker}: {system_reason(error)}", file=sys.stderr)
            self._tell(event="exited", worker=worker, code=1)
        else:
            self._tell(event="started", worker=worker, pid=pid)

    def _call(self, id: Any, function: str, arguments: dict[str, Any]) -> None:
        file = os.memfd_create("answer")

        def answer() -> int:
            try:
                text = json.dumps({"value": pkgutil.resolve_name(function)(**arguments)})
            except Exception as error:
                traceback.print_exc()
                text = json.dumps({"error": one_line(f"{type(error).__name__}: {error}")})
            with open(file, "w") as stream:
                stream.write(text)
            return 0

        try:
            self._fork(answer, id, file)
        except OSError as error:
            os.close(file)
            self._tell(event="result", id=id, error=f"no process can be started: {system_reason(error)}")

    def _fork(self, body: Callable[[], int], name: Any, answer: int | None = None) -> int:
        """Fork a child that exits with `body`'s result; return its pid. name, answer: see `_Child`. Raises OSError."""
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the child must not run the launcher's handler
        try:
            if (pid := os.fork()) == 0:
                self._become_child(launcher, body)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._children[pid] = _Child(name, answer)
        return pid

    def _become_child(self, launcher: int, body: Callable[[], int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            end_with(launcher)
            adopt()
            self._selector.close()
            for pipe in (self._commands, self._events, self._woken, self._waker, self._asked):
                os.close(pipe)
            for child in self._children.values():
                if child.answer is not None:
                    os.close(child.answer)
            faulthandler.enable(all_threads=False)  # only the thread that crashed
            code = body()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, CHUNK)
        with contextlib.suppress(ChildProcessError):  # when no child is left
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if (child := self._children.pop(pid, None)) is not None:
                    self._report_end(child, os.waitstatus_to_exitcode(status))
        self._end_orphans()

    def _report_end(self, child: _Child, code: int) -> None:
        """Report a worker's exit, or a call's result."""
        if child.answer is None:
            self._tell(event="exited", worker=child.name, code=code)
            return
        with open(child.answer) as stream:
            stream.seek(0)
            try:
                result = json.load(stream)
            except ValueError:
                result = {"error": f"the function's process ended without an answer, with code {code}"}
        self._tell(event="result", id=child.name, **result)

    def _end_orphans(self) -> None:
        """End the orphans of ended children, which the launcher adopts. A living child adopts its own orphans."""
        left = children().keys() - self._children.keys()
        self._orphans.end(left, time.monotonic())

    def _kill_all(self) -> None:
        """Kill children at once, and end their orphans as usual; give up after END_SECONDS."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        late = time.monotonic() + END_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < late:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                self._children.pop(pid, None)
                if pid == 0:
                    self._end_orphans()
                    time.sleep(WAIT_SECONDS)


def _tell(events: int, **event: Any) -> None:
    line = memoryview(json.dumps(event).encode() + b"\n")
    while line:
        line = line[os.write(events, line) :]


def _preload(modules: Sequence[str], events: int) -> None:
    """Import the modules that every worker needs. If a module fails, a worker that needs it reports the error."""
    with lasting_imports():
        for module in modules:
            _tell(events, event="importing", module=module)
            try:
                importlib.import_module(module)
            except Exception as error:
                print(f"launcher: cannot import {module}: {error!r}", file=sys.stderr)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # a thread pool would not survive the fork


def _own_channel() -> tuple[int, int]:
    """Move the command and event pipes away from stdin and stdout, which prints may use; return them."""
    commands, events = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return commands, events


def main() -> None:
    parser = argparse.ArgumentParser(description="Fork server for local workers; speaks JSON lines.")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE")
    parser.add_argument("--folder", dest="folders", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--bare", action="store_true", help="import only the modules named by --import")
    options = parser.parse_args()
    commands, events = _own_channel()
    end_with(os.getppid(), signal.SIGTERM)  # even in the middle of an import
    _preload([*(() if options.bare else MODULES), *options.modules], events)
    sys.path[:0] = options.folders  # not before, or a user's file named like one of torch's modules would be taken
    Launcher(commands, events).run()


if __name__ == "__main__":
    main()
