"""A process that stands in for a warm one: it forwards signals, and ends with the warm one's exit code or signal."""

import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

PREFIXES = ("ATEN_", "CUDA", "LANG", "LC_", "LD_", "MALLOC", "MKL_", "PRETENDED", "PYTHON")
OWN = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED")
NUMBER_BYTES = 4  # of a length, a process's number or an exit code


def read_at_start() -> dict[str, str]:
    """Return the environment variables that Python and torch read only at their start, except those in `OWN`."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES) and name not in OWN}


def alike(place: str) -> bool:
    """Return whether this process has the same `read_at_start` variables as the warm processes at `place`."""
    with open(f"{place}.json") as file:
        return read_at_start() == json.load(file)


def send(forker: socket.socket, start: dict[str, Any], files: list[int]) -> None:
    """Request a process with these standard files; `forking.become` describes `start`."""
    message = json.dumps(start).encode()
    socket.send_fds(forker, [len(message).to_bytes(NUMBER_BYTES, "big")], files)
    forker.sendall(message)


def run(place: str) -> NoReturn:
    """Let a warm process do this process's work, and end as it does. place: the path of the forker's socket."""
    start = {
        "arguments": sys.orig_argv[3:],
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "enter": [],
        "group": os.getpgid(0),
        "path": sys.path,
    }
    with socket.socket(socket.AF_UNIX) as forker:
        forker.connect(place)
        send(forker, start, [0, 1, 2])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: forker.send(bytes([number])))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        told = forker.recv(2 * NUMBER_BYTES, socket.MSG_WAITALL)  # its number, and later its exit code
    code = int.from_bytes(told[NUMBER_BYTES:], "big", signed=True) if told[NUMBER_BYTES:] else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
