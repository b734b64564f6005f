"""A check of a job's task by the trainer: whether it loads, and how much memory its workers need.

If the trainer or torch is not installed, `check_task` checks nothing, and its result says so.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bamboo.local.trainer_calls.trainer_process import ask_trainer, missing_packages
from bamboo_core.text import count, size

CHECK: Final = "bamboo_trainer.check:check"
COUNT: Final = "bamboo_trainer.check:count_layers"
SHOWN_STAGES = 8
SHOWN_KINDS = 3


def check_task(manifest: dict[str, Any], folders: Sequence[Path]) -> tuple[str, ...]:
    """Load a task, and build its layers without values; return lines about its layers, initial values and memory.

    Without the trainer or torch, the only line says so. folders: searched for the task's modules. Raises TrainerError.
    """
    if missing := missing_packages():
        return (f"not checked: the task, since {missing} is not installed here",)
    answer = ask_trainer(CHECK, {"manifest": manifest}, folders, failed="the task could not be tried")
    initial = (f"initial values: {line}" for line in answer["initial"])
    return (_task(answer), *initial, _memory(answer))


def count_layers(manifest: dict[str, Any], folders: Sequence[Path]) -> int:
    """Load a task and count its layers. folders: as in `check_task`. Raises TrainerError, also without the trainer."""
    return int(ask_trainer(COUNT, {"manifest": manifest}, folders, failed="the task could not be tried")["layers"])


def _task(answer: dict[str, Any]) -> str:
    """Describe a task: "task: 4 layers, 2.5 M parameters; layers of the stages: 0-1 (0.9 M), 2-3 (1.6 M)"."""
    stages = answer["stages"]
    shown = [
        f"{first if first == last else f'{first}-{last}'} ({_millions(parameters)})"
        for first, last, parameters in stages[:SHOWN_STAGES]
    ]
    of = f"{count(len(stages), 'stage')}, the most that may be chosen" if answer["chosen"] else "the stages"
    more = f" and {len(stages) - SHOWN_STAGES} more" if len(stages) > SHOWN_STAGES else ""
    return (
        f"task: {count(answer['layers'], 'layer')}, {_millions(answer['parameters'])} parameters;"
        f" layers of {of}: {', '.join(shown)}{more}"
    )


def _memory(answer: dict[str, Any]) -> str:
    """Describe the most memory that a worker needs, without torch's own (a GPU's context, the allocator's cache)."""
    calm, taken = answer["calm"], answer["taken_over"]
    kinds = sorted(calm["memory"].items(), key=lambda kind: -kind[1])[:SHOWN_KINDS]
    most = ", ".join(f"{name} {size(number)}" for name, number in kinds if number)
    neighbours = answer["neighbours"]
    some = {0: "the stage of another pipeline", 1: "a lost neighbour's stage"}
    stages = some.get(neighbours, f"the stages of {neighbours} lost neighbours")
    more = taken["memory"] != calm["memory"]
    later = f", up to {size(sum(taken['memory'].values()))} while it runs {stages} too" if more else ""
    worker = f"the worker of stage {calm['stage']}"
    worker = f"a device of {worker}" if answer["devices"] > 1 else worker
    about = size(sum(calm["memory"].values()))
    return f"memory: about {about} for {worker} ({most}){later}; torch itself comes on top"


def _millions(parameters: int) -> str:
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{name}"
    return str(parameters)
