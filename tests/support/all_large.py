"""A task in whose workers all frames with tensors travel as large ones do."""

from collections.abc import Mapping
from typing import Any

from bamboo_trainer.loading import load_task
from bamboo_trainer.task import Task
from bamboo_trainer.transport import wire


def build(config: Mapping[str, Any]) -> Task:
    wire.STRIPED_FROM = 1  # type: ignore[misc]
    return load_task("bamboo_trainer.models.gpt:build", config)
