"""The process that a test's job has started as its launcher, while a forked one does the work: it ends as that does."""

import json
import os
import signal
import socket
import sys
from typing import NoReturn

CODE_BYTES = 4  # of an exit code, negative for a signal
TERMINATE = b"T"


def run(place: str) -> NoReturn:
    """place: the socket of those who fork. The forked launcher gets all that this process was given."""
    start = {
        "argv": sys.orig_argv[4:],
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "group": os.getpgid(0),
        "path": sys.path,
    }
    with socket.socket(socket.AF_UNIX) as forker:
        forker.connect(place)
        message = json.dumps(start).encode()
        socket.send_fds(forker, [len(message).to_bytes(CODE_BYTES, "big")], [0, 1, 2])
        forker.sendall(message)
        signal.signal(signal.SIGTERM, lambda *_: forker.send(TERMINATE))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        told = forker.recv(CODE_BYTES, socket.MSG_WAITALL)
    code = int.from_bytes(told, "big", signed=True) if len(told) == CODE_BYTES else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
