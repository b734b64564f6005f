"""The small GPT, with data that several processes read ahead."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bamboo_trainer.data import Prefetched
from bamboo_trainer.models import gpt
from bamboo_trainer.task import Task


def build(config: Mapping[str, Any]) -> Task:
    task = gpt.build(config)
    return replace(task, dataset=Prefetched(task.dataset, readers=2, ahead=5))
