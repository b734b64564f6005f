"""A worker in which a bit flips at a chosen (instruction, cell, step, microbatch), once per job, without any error."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bamboo_core.planning.plan import Cell
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.worker.launch import process

ENVIRONMENT = "BAMBOO_TEST_FLIP"  # {"mark": file, "place": [name, pipeline, stage, step, microbatch]}


def flip(tensor: Tensor) -> None:
    """The lowest bit of the exponent of its first number, which is then twice or half of what it was."""
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[0] ^= 1 << 23


class Flipping:
    """Strikes in what the stage computes next: in what a forward returns, or in the parameters after a step."""

    def __init__(self) -> None:
        document = json.loads(os.environ[ENVIRONMENT])
        self.mark, self.place = Path(document["mark"]), tuple(document["place"])
        self.armed = False

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.armed = (name, cell.pipeline, cell.stage, step, microbatch) == self.place

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self.armed = False

    def event(self, name: str, **facts: object) -> None:
        pass

    def close(self) -> None:
        pass

    def strikes(self) -> bool:
        """Now, for the first time?"""
        if not self.armed:
            return False
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def main(worker_id: str = "", **arguments: str) -> int:
    name, flipping = arguments.pop("worker", worker_id), Flipping()
    complete, apply = Stage.complete, StageValues.apply

    def wrong_complete(stage: Stage, *given: Any) -> Any:
        outputs = complete(stage, *given)
        if outputs and flipping.strikes():
            flip(outputs[0])
        return outputs

    def wrong_apply(values: StageValues, *given: Any, **named: Any) -> None:
        apply(values, *given, **named)
        if flipping.strikes():
            flip(next(tensor.detach() for _, tensor in values.parameters.named()))

    Stage.complete, StageValues.apply = wrong_complete, wrong_apply  # type: ignore[method-assign]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return process.main(worker=name, observer=flipping, **arguments)
