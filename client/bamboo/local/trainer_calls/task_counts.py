"""Counts what a job's layers compute and move. The trainer does it, in its own process, on any machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bamboo.local.fork_server import ForkServerError
from bamboo.local.trainer_calls.trainer_process import ask_trainer, missing_packages
from bamboo.profiles.layer_counts import LayerCount, TaskCounts, folded
from bamboo.simulation.profile_match import task_of
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ProfileError

COUNT: Final = "bamboo_trainer.layer_work:count"
SOURCE: Final = "counted from the layers with torch's counter, on tensors without data where that is possible"


def count_task(spec: JobSpec, manifest: dict[str, Any], folders: Sequence[Path]) -> TaskCounts:
    """The counts of a task's layers, which the trainer makes in a process of its own. folders: of the task's modules.
    Raises ProfileError.
    """
    if missing := missing_packages():
        raise ProfileError(f"what the job's layers do is counted with {missing}, not installed here")
    try:
        answer = ask_trainer(COUNT, {"manifest": manifest}, folders, failed="the layers could not be counted")
    except ForkServerError as error:
        raise ProfileError(str(error)) from None
    if problem := answer.get("problem"):
        raise ProfileError(str(problem))
    return counts_of(spec, answer)


def counts_of(spec: JobSpec, answer: dict[str, Any]) -> TaskCounts:
    """The counts that the trainer has answered. answer: of `bamboo_trainer.layer_work.count`."""
    layers = msgspec.convert(answer["layers"], tuple[LayerCount, ...])
    return TaskCounts(
        name=spec.name, samples=spec.training.micro_batch_size, layers=folded(layers), task=task_of(spec), source=SOURCE
    )
