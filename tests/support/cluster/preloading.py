"""The process from which preloaded programs are forked; `preloaded.py` starts it and says what to fork.

A script, run with the socket to its starter as standard input. Each message is a container to start, with two files:
its log, and a pipe for two lines: the number of its process, and later its exit code.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bamboo_trainer.worker.launcher import MODULES, lasting_imports

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Fork containers until the other end of the socket is closed."""
    with lasting_imports():
        for module in (*MODULES, "bamboo_trainer.worker.metrics", "bamboo_operator.flags"):
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the supervisors' ends
    control = socket.socket(fileno=os.dup(0))
    while True:
        text, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not text:
            return
        log, told = files
        if os.fork() == 0:
            control.close()
            supervise(json.loads(text), log, told)
        for file in files:
            os.close(file)


def supervise(start: dict[str, Any], log: int, told: int) -> NoReturn:
    """Run one container's first process as its parent, and report its number and its end."""
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (child := os.fork()) == 0:
        os.close(told)
        run(start, log)
    os.write(told, f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def run(start: dict[str, Any], log: int) -> NoReturn:
    """Become what `python -m MODULE` would be in the container."""

    def prepare() -> None:
        os.setsid()
        end_with_parent()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file, number)
        os.closerange(3, max(nothing, log) + 1)
        os.environ.clear()
        os.environ.update(start["env"])
        if start["enter"]:
            enter(start["enter"])
        else:
            os.chdir(start["folder"])
        sys.path[:0] = [os.getcwd(), *filter(None, start["env"].get("PYTHONPATH", "").split(os.pathsep))]

    run_as_main(prepare, start["arguments"])


def run_as_main(prepare: Callable[[], None], arguments: Sequence[str]) -> NoReturn:
    """Prepare this process, and become what `python -m` with these arguments would be."""
    code = 1
    try:
        prepare()
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def enter(command: Sequence[str]) -> None:
    """Enter the mounts, the root and the folder that the command gives to the program that it runs."""
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
