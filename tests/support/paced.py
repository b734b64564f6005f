"""A task whose data come slowly while a file exists, so that a test can act in time on any machine."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bamboo_trainer.data import sample_numbers
from bamboo_trainer.loading import load_task
from bamboo_trainer.task import Dataset, Parts, Task

# Entries of task.config.
WHILE = "slowWhileThereIs"  # a file
TASK = "slowTask"  # the entrypoint of the task that is slowed; without it the GPT
SINCE = "slowSince"  # step, seed, globalBatchSize: data of earlier steps come fast; without it all come slowly
SECONDS = "slowSeconds"  # for each microbatch

LITTLE = 0.04


@dataclass(frozen=True, slots=True)
class Slow:
    data: Dataset
    mark: Path
    seconds: float
    fast: frozenset[int] = frozenset()  # samples that come at once

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        if not self.fast.issuperset(indices) and self.mark.exists():
            time.sleep(self.seconds)
        return self.data.batch(indices)


def build(config: Mapping[str, Any]) -> Task:
    rest = dict(config)
    mark, since = Path(rest.pop(WHILE)), rest.pop(SINCE, {"step": 0, "seed": 0, "globalBatchSize": 1})
    seconds = rest.pop(SECONDS, LITTLE)
    task = load_task(rest.pop(TASK, "bamboo_trainer.models.gpt:build"), rest)
    length, size = len(task.dataset), since["globalBatchSize"]
    early = [sample_numbers(since["seed"], step * size, size, length) for step in range(since["step"])]
    return replace(task, dataset=Slow(task.dataset, mark, seconds, frozenset().union(*early)))


def slowed(manifest: Mapping[str, Any], mark: Path, since: int = 0, seconds: float = LITTLE) -> dict[str, Any]:
    """Return the manifest of a job that is slow from step `since` on. Its workers need this folder in PYTHONPATH.

    seconds: the delay of each microbatch. The task recognizes a step by its samples, so the dataset must hold more
    samples than the steps before `since` read. mark: the file whose removal ends the delays.
    """
    spec = manifest["spec"]
    task, training = spec["task"], spec["training"]
    first = {"step": since, "seed": training.get("seed", 0), "globalBatchSize": training["globalBatchSize"]}
    config = {**task["config"], TASK: task["entrypoint"], WHILE: str(mark), SINCE: first, SECONDS: seconds}
    return {**manifest, "spec": {**spec, "task": {"entrypoint": "paced:build", "config": config}}}
