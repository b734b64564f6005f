"""The process from which warm ones are forked, with the imports of workers, their launchers and the operator.

Tests run this script with a listening socket as standard input; `warm_stand_in.py` and `cluster/preloaded.py` connect
to it. Each connection starts one process. The starter sends the length of a JSON document, with the three standard
files, then the document, then a byte for each signal. It receives the process's ID and, at the process's end, the exit
code, negative for a signal. The process is killed if the connection closes.
"""

import contextlib
import ctypes
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from warm_stand_in import NUMBER_BYTES

from bamboo_trainer.worker import launcher
from bamboo_trainer.worker.launcher import lasting_imports

MODULES = (*launcher.MODULES, "bamboo_trainer.worker.metrics", "bamboo_operator.flags")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
USUAL_PATH = [folder for folder in sys.path if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


def main() -> NoReturn:
    """Fork a warm process for each connection, until the parent process ends."""
    end_with_parent()
    with lasting_imports():
        for module in MODULES:
            importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)  # a thread pool would not survive the fork
    del sys.modules[launcher.__name__]  # it is to be run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the supervisors' ends
    listener = socket.socket(fileno=os.dup(0))
    while True:
        starter, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            supervise(starter)
        starter.close()


def supervise(starter: socket.socket) -> NoReturn:
    """Start a warm process, send it the starter's signals, report its exit code, and kill it if the starter ends."""
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(starter, NUMBER_BYTES, 3, socket.MSG_WAITALL)
    text = starter.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    if len(files) < 3 or not text:
        os._exit(0)  # the starter was killed before it had sent everything
    if (child := os.fork()) == 0:
        become(json.loads(text), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    poll = select.poll()
    for one in (ended, starter.fileno()):
        poll.register(one, select.POLLIN)
    with contextlib.suppress(BrokenPipeError):  # the starter was killed
        starter.send(child.to_bytes(NUMBER_BYTES, "big", signed=True))
    while ended not in (ready := [file for file, _ in poll.poll()]):
        if ready:
            os.kill(child, (starter.recv(1) or bytes([signal.SIGKILL]))[0])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):
        starter.send(code.to_bytes(NUMBER_BYTES, "big", signed=True))
    os._exit(0)


def become(start: dict[str, Any], files: list[int]) -> NoReturn:
    """Run a module as `python -m ARGUMENTS` would, with these standard files, and exit with its code.

    start: `arguments`; `env`; `enter`: a command for enter(), if not empty; `folder`: else its working directory;
    `group`: its process group, None for a new session; `path`: sys.path, None for that of Python without -P.
    """
    code = 1
    try:
        end_with_parent()
        if start["group"] is None:
            os.setsid()
        else:
            with contextlib.suppress(PermissionError):  # of a group in another session
                os.setpgid(0, start["group"])
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(start["env"])
        sys.stdin, sys.stdout, sys.stderr = stream(0, "r"), stream(1, "w"), stream(2, "w", errors="backslashreplace")
        if start["enter"]:
            enter(start["enter"])
        else:
            os.chdir(start["folder"])
        named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:] = start["path"] or [os.getcwd(), *named, *USUAL_PATH]
        sys.argv = list(start["arguments"])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def stream(number: int, mode: str, errors: str = "strict") -> TextIO:
    """Return a text stream on a file descriptor, as Python makes standard streams at its start."""
    unbuffered = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = io.FileIO(number, mode, closefd=False)
    buffered = binary if unbuffered else io.BufferedWriter(binary) if mode == "w" else io.BufferedReader(binary)
    lines = binary.isatty() or number == 2
    return io.TextIOWrapper(buffered, errors=errors, line_buffering=lines, write_through=unbuffered)  # type: ignore[type-var]


def enter(command: Sequence[str]) -> None:
    """Enter the mounts, root and folder in which a command runs programs. Exits with its code if it fails."""
    with subprocess.Popen([*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as there:
        assert there.stdin is not None
        assert there.stdout is not None
        there.stdin.write(b"\n")
        there.stdin.flush()
        if not there.stdout.read(1):
            sys.exit(there.wait())  # it has said why
        place = Path("/proc", str(there.pid))
        mounts, root, folder = (os.open(place / name, os.O_RDONLY) for name in ("ns/mnt", "root", "cwd"))
        if LIBC.setns(mounts, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.fchdir(root)
        os.chroot(".")
        os.fchdir(folder)
        for file in (mounts, root, folder):
            os.close(file)


def end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
