"""How many layers a job's model has, as the trainer builds it, in its own process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bamboo.local.fork_server import ForkServerError
from bamboo.local.trainer_calls.trainer_process import ask_trainer, missing_packages

COUNT: Final = "bamboo_trainer.check:count_layers"
COUNT_SECONDS: Final = 120.0


def count_layers(manifest: dict[str, Any], folders: Sequence[Path]) -> int | str:
    """The number of layers of a task, or why that cannot be told on this machine. folders: of the task's modules."""
    if missing := missing_packages():
        return f"{missing} not installed"
    try:
        answer = ask_trainer(
            COUNT, {"manifest": manifest}, folders, seconds=COUNT_SECONDS, failed="the task could not be tried"
        )
    except ForkServerError as error:
        return str(error)
    return str(answer["problem"]) if "problem" in answer else int(answer["layers"])
