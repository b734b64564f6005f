"""A worker that kills or freezes itself at each chosen (instruction, cell, step, microbatch), once per job."""

import json
import os
import signal
from pathlib import Path

from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker import process
from bamboo_trainer.worker.telemetry import Follower

ENVIRONMENT = "BAMBOO_TEST_FAULTS"  # {"marks": folder, "faults": [[name, pipeline, stage, step, microbatch, signal]]}


class Faulty(Follower):
    def __init__(self) -> None:
        document = json.loads(os.environ[ENVIRONMENT])
        self.marks = Path(document["marks"])
        self.faults = {tuple(fault[:5]): int(fault[5]) for fault in document["faults"]}

    def begins(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        key = (name, cell.pipeline, cell.stage, step, microbatch)
        if key not in self.faults:
            return
        try:
            (self.marks / "-".join(map(str, key))).touch(exist_ok=False)
        except FileExistsError:
            return  # it has struck already; this is the takeover's repetition
        os.kill(os.getpid(), self.faults[key])


def main(worker_id: str = "", **arguments: str) -> int:
    name = arguments.pop("worker", worker_id)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return process.main(worker=name, follower=Faulty(), **arguments)
