"""What the trainer does for a command, in a process of its own, since it needs torch, and this one may not have it."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from bamboo.names import EXIT_FAILED

NEEDED = ("bamboo_trainer", "torch")
END_SECONDS = 30.0  # in which the process removes what is half written


def run_trainer(module: str, arguments: Sequence[str], what: str) -> int:
    """`python -m MODULE`; the process's exit code. It prints what it does itself. what: it is for, in words."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"bamboo: {what} needs {' and '.join(missing)}, not installed here", file=sys.stderr)
        return EXIT_FAILED
    process = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments])
    try:
        return process.wait()
    finally:  # a signal to this process
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
