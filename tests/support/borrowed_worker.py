"""A worker of a job whose launcher other jobs use, too: what is its job's alone it reads when it starts."""

import json
import os
from pathlib import Path

from bamboo_trainer.worker.launcher import WORKER_MAIN, resolve

STARTS = "BAMBOO_TEST_STARTS"  # a folder, with a file for each job's token


def describe(folder: Path, token: str, *, main: str | None, log: Path) -> None:
    """Writes for all workers with that token: the test's environment, what they run, and where they print.

    Written once and as a whole: a worker that was just started reads it while the next one is.
    """
    if (folder / token).exists():
        return
    whole = folder / f".{token}"
    whole.write_text(json.dumps({"main": main or WORKER_MAIN, "log": str(log), "environment": dict(os.environ)}))
    whole.rename(folder / token)


def main(token: str, **arguments: str) -> int:
    start = json.loads((Path(os.environ[STARTS]) / token).read_text())
    os.environ.update(start["environment"])
    log = os.open(start["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    return int(resolve(start["main"])(token=token, **arguments))
