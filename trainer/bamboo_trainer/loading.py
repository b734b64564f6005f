"""Loading of a job's task: its entrypoint is imported and called, and the result is checked."""

import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from bamboo_core.checkpoint.layout import MOST_LAYERS
from bamboo_core.job.spec import JobSpec
from bamboo_core.text import count
from bamboo_trainer.memory.estimate import checkpointed_layers
from bamboo_trainer.task import Task, TrainingFacts
from bamboo_trainer.tasks.inspection import stated_costs
from bamboo_trainer.tasks.scheduled_optimizer import require_learning_rate
from bamboo_trainer.tasks.task_errors import TaskError, blamed, complaint, describe
from bamboo_trainer.tasks.ties import settled
from bamboo_trainer.tasks.user_code import check_functions, dataset_length, layer_factory
from bamboo_trainer.training import shown_to_build, with_steps

# The facts for a `build` that is called by itself, and not for a job.
ALONE: Final = TrainingFacts(steps=1, global_batch_size=1, micro_batch_size=1)


def settled_task(spec: JobSpec) -> tuple[Task, JobSpec]:
    """Return a job's task with shared parameters tied, and the job with its number of steps, from its data if needed.

    Raises TaskError, also for an invalid learning rate or a dataset smaller than a step's batch; TaskOutOfMemory.
    """
    task = settled(task_of(spec), spec.training.seed)
    require_learning_rate(task)
    samples, batch = dataset_length(task), spec.training.global_batch_size
    if samples < batch:
        raise TaskError(
            f"the dataset has {count(samples, 'sample')}, expected at least the {batch} of a step "
            "(spec.training.globalBatchSize)"
        )
    return task, with_steps(spec, task)


def task_of(spec: JobSpec) -> Task:
    """Return a job's task from its `build`. Raises like `load_task`."""
    return load_task(spec.task.entrypoint, spec.task.config, shown_to_build(spec.training))


def load_task(entrypoint: str, config: Mapping[str, Any], training: TrainingFacts = ALONE) -> Task:
    """Import "module:function" and call it with the config, and the training facts if it takes them; return its task.

    Raises TaskError for a failed import or call or an invalid task; TaskOutOfMemory if a call runs out of memory.
    """
    module_name, _, name = entrypoint.partition(":")
    if not module_name or not name:
        raise TaskError(f'task.entrypoint must be "module:function", got {entrypoint!r}')
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises at import
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(f"cannot import {module_name!r}: there is no such module in {_searched()}") from error
        raise TaskError(f"cannot import {module_name!r}: {describe(error)}") from error
    build = getattr(module, name, None)
    if not callable(build):
        problem = "has no" if build is None else "has a non-callable"
        file = getattr(module, "__file__", None) or "built into Python"
        raise TaskError(f"task.entrypoint {entrypoint!r}: the module ({file}) {problem} {name!r}")
    try:
        task = build(config, training) if _takes_training(build) else build(config)
    except TaskError:
        raise
    except ValueError as error:
        raise TaskError(f"task.config: {complaint(error)}") from error
    except Exception as error:
        raise blamed(entrypoint, error) from error
    except SystemExit as error:
        raise TaskError(f"{entrypoint} raised {describe(error)}") from error
    if not isinstance(task, Task):
        raise TaskError(f"{entrypoint} returned {type(task).__name__}, expected a bamboo_trainer.task.Task")
    if not task.layers:
        raise TaskError(f"{entrypoint} returned a task without layers")
    if len(task.layers) > MOST_LAYERS:
        raise TaskError(
            f"{entrypoint} returned a task of {len(task.layers)} layers, at most {MOST_LAYERS} are accepted"
        )
    for layer in range(len(task.layers)):
        layer_factory(task, layer)
    checkpointed_layers(task)
    if task.costs is not None:
        stated_costs(task, task.costs)
    check_functions(task)
    dataset_length(task)
    return task


def _takes_training(build: Callable[..., Any]) -> bool:
    """Return whether `build` takes TrainingFacts: its second positional parameter is required or named "training"."""
    try:
        places = [p for p in inspect.signature(build).parameters.values() if p.kind in _PLACES]
    except (TypeError, ValueError):
        return False  # unknown
    return len(places) > 1 and (places[1].name == "training" or places[1].default is inspect.Parameter.empty)


_PLACES: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _searched() -> str:
    """Return where Python looks for a module, as text: folders of sys.path before its library, installed packages."""
    library = sysconfig.get_paths()["stdlib"]
    own = takewhile(lambda entry: entry != library and not entry.endswith(".zip"), sys.path)
    folders = dict.fromkeys(str(Path(entry).absolute()) for entry in own)
    return " or ".join([*folders, "the installed packages"])
