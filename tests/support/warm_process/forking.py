"""The process from which warm ones are forked, with the imports of every launcher of workers.

A script, run with the listening socket as standard input; `warm_stand_in.py` has the protocol of a connection.
"""

import contextlib
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn, TextIO

from warm_stand_in import CODE_BYTES

from bamboo_trainer.worker import launcher
from bamboo_trainer.worker.launcher import lasting_imports
from cluster.preloading import end_with_parent, run_as_main


def main() -> NoReturn:
    """Fork warm processes until the starter ends."""
    end_with_parent()
    with lasting_imports():
        for module in launcher.MODULES:
            importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)  # a thread pool would not survive the fork
    del sys.modules[launcher.__name__]  # it is to be run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the supervisors' ends
    listener = socket.socket(fileno=os.dup(0))
    while True:
        stand_in, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            supervise(stand_in)
        stand_in.close()


def supervise(stand_in: socket.socket) -> NoReturn:
    """Run one warm process as its parent; it ends with its stand-in."""
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(stand_in, CODE_BYTES, 3, socket.MSG_WAITALL)
    text = stand_in.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    if len(files) < 3 or not text:
        os._exit(0)  # it was killed before it had said all
    if (child := os.fork()) == 0:
        become(json.loads(text), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    poll = select.poll()
    for one in (ended, stand_in.fileno()):
        poll.register(one, select.POLLIN)
    while ended not in (ready := [file for file, _ in poll.poll()]):
        if ready:
            os.kill(child, (stand_in.recv(1) or bytes([signal.SIGKILL]))[0])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):  # the stand-in was killed
        stand_in.send(code.to_bytes(CODE_BYTES, "big", signed=True))
    os._exit(0)


def become(start: dict[str, Any], files: list[int]) -> NoReturn:
    """Become the process that the stand-in was started as, with its files, environment, folder and group."""

    def prepare() -> None:
        end_with_parent()
        with contextlib.suppress(PermissionError):  # of a group in another session
            os.setpgid(0, start["group"])
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(start["env"])
        sys.stdin, sys.stdout, sys.stderr = stream(0, "r"), stream(1, "w"), stream(2, "w", errors="backslashreplace")
        os.chdir(start["folder"])
        sys.path[:] = start["path"]

    run_as_main(prepare, [start["module"], *start["argv"]])


def stream(number: int, mode: str, errors: str = "strict") -> TextIO:
    """Return a text stream of that file as Python makes it at its start."""
    unbuffered = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = io.FileIO(number, mode, closefd=False)
    buffered = binary if unbuffered else io.BufferedWriter(binary) if mode == "w" else io.BufferedReader(binary)
    lines = binary.isatty() or number == 2
    return io.TextIOWrapper(buffered, errors=errors, line_buffering=lines, write_through=unbuffered)  # type: ignore[type-var]


if __name__ == "__main__":
    main()
