"""`bamboo export`: done by the trainer, in a process of its own, since it needs torch, and this one may not have it."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from bamboo.names import EXIT_FAILED

MODULE = "bamboo_trainer.checkpoint"
NEEDED = ("bamboo_trainer", "torch")
END_SECONDS = 30.0  # in which the process removes what is half written


def export(arguments: Sequence[str]) -> int:
    """The process's exit code. It prints what it does itself."""
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        print(f"bamboo: an export needs {' and '.join(missing)}, not installed here", file=sys.stderr)
        return EXIT_FAILED
    process = subprocess.Popen([sys.executable, "-P", "-m", MODULE, *arguments])
    try:
        return process.wait()
    finally:  # a signal to this process
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
