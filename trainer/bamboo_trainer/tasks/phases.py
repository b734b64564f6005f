"""The phases of a task: whose turn a step is, and what holds in it. Pure functions of the step's number."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from bamboo_trainer.task import Phase, Task
from bamboo_trainer.tasks.capture import Capture, capturing
from bamboo_trainer.tasks.losses import checked_name
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import tied_groups
from bamboo_trainer.tasks.user_code import check_metrics

MOST_PHASES: Final = 16
MOST_STEPS: Final = 10_000  # of a cycle


@dataclass(frozen=True, slots=True, eq=False)
class TaskInPhase:
    """A task as it is in the steps of one of its phases. A task without phases is so in all of its steps.

    task: with the loss, metrics, optimizer and schedules that hold in these steps. name: "" without phases.
    first, steps, cycle: its first step, how many follow each other, and after how many the first one comes again.
    patterns: of the parameters that are trained; None: all are. tied: all names of each tied one, by the first.
    """

    task: Task
    name: str = ""
    first: int = 0
    steps: int = 1
    cycle: int = 1
    patterns: tuple[str, ...] | None = None
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """What has its loss, optimizer and schedules, in a sentence."""
        return f"task.phases[{self.name!r}]" if self.name else "task"

    @property
    def loss_name(self) -> str:
        """Under which name the loss of its steps is told beside that of all steps; "" without phases."""
        return f"{self.name}_loss" if self.name else ""

    def has(self, step: int) -> bool:
        """Is that step its?"""
        return self.first <= step % self.cycle < self.first + self.steps

    def own(self, step: int) -> int:
        """How many steps it has had before that one."""
        cycles, within = divmod(step, self.cycle)
        return cycles * self.steps + min(max(within - self.first, 0), self.steps)

    def trains(self, name: str) -> bool:
        """Is the parameter of that name, "<layer>.<name in the layer>", trained in its steps? A tied one has its first
        name, and is trained if any of its names fits.
        """
        if self.patterns is None:
            return True
        return any(fits(one, self.patterns) for one in self.tied.get(name, (name,)))

    def rest(self, layer: nn.Module, index: int) -> None:
        """Have no backward of a layer reach the parameters that it does not train; of one that is only looked at."""
        for name, parameter in layer.named_parameters() if self.patterns is not None else ():
            parameter.requires_grad_(parameter.requires_grad and self.trains(f"{index}.{name}"))

    def told(self) -> AbstractContextManager[object]:
        """A block in which layers that are only looked at are told the phase."""
        return self._telling() if self.name else nullcontext()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        capture = Capture(phase=self.name)
        capture.close()
        with capturing(capture):
            yield


def phases_of(task: Task) -> tuple[TaskInPhase, ...]:
    """In the order of their first steps; one that has all steps if the task has no phases."""
    if not task.phases:
        return (TaskInPhase(task),)
    tied_groups(task)  # raises what is wrong with them
    tied = {names[0]: names for names in task.tied}
    cycle, first, found = sum(one.steps for one in task.phases), 0, list[TaskInPhase]()
    for one in task.phases:
        inside = replace(
            task,
            loss=one.loss or task.loss,
            metrics=task.metrics if one.metrics is None else one.metrics,
            optimizer=one.optimizer or task.optimizer,
            learning_rate=one.learning_rate or task.learning_rate,
            schedules=task.schedules if one.schedules is None else one.schedules,
        )
        found.append(TaskInPhase(inside, one.name, first, one.steps, cycle, _patterns(one), tied))
        first += one.steps
    return tuple(found)


def phase_at(phases: Sequence[TaskInPhase], step: int) -> TaskInPhase:
    """The one of these, which are all of a task, that has that step."""
    return next(one for one in phases if one.has(step))


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Does a parameter's name fit one of these?"""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def wanted_names(task: Task) -> list[tuple[str, tuple[str, ...]]]:
    """Phases with patterns of theirs, one of which some trained parameter's name has to fit. A layer that is named by
    its number may have none, unless they are all so.
    """
    single = [(one.name, (named,)) for one in task.phases for named in one.trains if isinstance(named, str)]
    return [*single, *((one.name, _patterns(one)) for one in task.phases)]


def _patterns(one: Phase) -> tuple[str, ...]:
    return tuple(f"{n}.*" if isinstance(n, int) else n for n in one.trains)


def check_phases(task: Task) -> None:
    """Raises TaskError if the task's phases are none."""
    given: Any = task.phases
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(p, Phase) for p in given):
        raise TaskError(f"Task.phases: expected a sequence of bamboo_trainer.task.Phase, got {type(given).__name__}")
    if len(given) > MOST_PHASES:
        raise TaskError(f"Task.phases: {len(given)} phases, at most {MOST_PHASES} are accepted")
    for one in given:
        _check(task, one)
    names = [one.name for one in given]
    if twice := [name for name in names if names.count(name) > 1]:
        raise TaskError(f"Task.phases: two are called {twice[0]!r}, expected names that differ")
    if (cycle := sum(one.steps for one in given)) > MOST_STEPS:
        raise TaskError(f"Task.phases: they have {cycle} steps together, at most {MOST_STEPS} are accepted")
    for inside in phases_of(task):
        check_metrics(inside.task)


def _check(task: Task, one: Phase) -> None:
    checked_name(one.name, "Task.phases: a name")
    where = f"Task.phases[{one.name!r}]"
    if type(one.steps) is not int or one.steps < 1:
        raise TaskError(f"{where}.steps: expected a number of at least 1, got {one.steps!r}")
    expected = 'expected numbers of layers, or names or patterns such as "0.weight" and "1.*" in a tuple'
    if isinstance(one.trains, str) or not isinstance(one.trains, Sequence) or not one.trains:
        raise TaskError(f"{where}.trains: {expected}, got {one.trains!r}")
    for place in one.trains:
        if isinstance(place, bool) or not isinstance(place, str | int):
            raise TaskError(f"{where}.trains: {expected}, got {place!r} in it")
        if isinstance(place, int) and not 0 <= place < len(task.layers):
            raise TaskError(f"{where}.trains: {place} is none of the layers 0 to {len(task.layers) - 1}")
    for name in ("loss", "optimizer", "learning_rate"):
        if (value := getattr(one, name)) is not None and not callable(value):
            raise TaskError(f"{where}.{name}: expected a function, got {type(value).__name__}")
