"""The GPT, whose data come slowly as long as a file is there: a story has its time on a machine of any speed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bamboo_trainer.models import gpt
from bamboo_trainer.task import Dataset, Parts, Task

WHILE = "slowWhileThereIs"  # a file: an entry of task.config
SECONDS = 0.04  # for each microbatch


@dataclass(frozen=True, slots=True)
class Slow:
    data: Dataset
    mark: Path

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        if self.mark.exists():
            time.sleep(SECONDS)
        return self.data.batch(indices)


def build(config: Mapping[str, Any]) -> Task:
    task = gpt.build({key: value for key, value in config.items() if key != WHILE})
    return replace(task, dataset=Slow(task.dataset, Path(config[WHILE])))
