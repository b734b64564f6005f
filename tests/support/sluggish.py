"""A task whose layers take their time while a file is there, and four times as long in the process that it names.

So a test has a slow worker, on a machine of any speed: sleeping takes nobody's processor.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from bamboo_trainer.models import mlp
from bamboo_trainer.task import Task

MARK = "mark"  # an entry of task.config: the file, with a process id
SECONDS, SLOWER = 0.01, 4  # of a layer's forward


def build(config: Mapping[str, Any]) -> Task:
    rest = dict(config)
    mark = Path(rest.pop(MARK))
    task = mlp.build(rest)
    return replace(task, layers=tuple(_sluggish(factory, mark) for factory in task.layers))


def _sluggish(factory: Callable[[], nn.Module], mark: Path) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        layer = factory()
        layer.register_forward_pre_hook(lambda *_: _sleep(mark))
        return layer

    return made


def _sleep(mark: Path) -> None:
    try:
        named = mark.read_text()
    except FileNotFoundError:
        return
    time.sleep(SECONDS * (SLOWER if named == str(os.getpid()) else 1))
