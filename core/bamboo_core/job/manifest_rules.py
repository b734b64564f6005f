"""The rules between a manifest's fields, as functions, which crds/generate.py translates into the CRD's CEL rules.

A rule belongs to a type of the API and is checked on each object of that type. A field with Mark.FOLLOWS that the
manifest leaves out is None to a rule, because an API server does not store it. For the translation, a rule's function
returns one expression of fields, constants, other such functions and properties, with `and`, `or`, `not`, comparisons,
arithmetic, subscripts, `... if ... else ...`, `len`, `str`, `endswith` and `all(... for n in ...)`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bamboo_core.job.fields import Problem, is_within, show
from bamboo_core.job.model import Mark, Object, ObjectList, ReadObject, api_fields
from bamboo_core.job.placement_spec import GPU_SUFFIX, WorkerSpec
from bamboo_core.job.spec import BudgetSpec, ElasticSpec, JobSpec, TopologySpec
from bamboo_core.job.training_spec import DEFAULT_GROUPS, ParameterPrecision, Precision, TrainingSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that every object of one type of the API must meet.

    path: from the object to the field that breaks the rule; "" is the object. expected: the problem's message, to which
    the parser adds the values that the rule read. holds: returns whether an object (`_Stored`) meets the condition.
    """

    path: str
    expected: str
    holds: Callable[[Any], bool]


RULES: dict[type, list[Rule]] = {}  # by their types, in the order in which problems are reported


def rule(kind: type[T], path: str, expected: str) -> Callable[[Callable[[T], bool]], Callable[[T], bool]]:
    """Return a decorator that registers a function as a rule of the type `kind`; see `Rule`."""

    def register(holds: Callable[[T], bool]) -> Callable[[T], bool]:
        RULES.setdefault(kind, []).append(Rule(path, expected, holds))
        return holds

    return register


def check_rules(found: Sequence[ReadObject], problems: list[Problem]) -> None:
    """Check the rules of these objects; add broken ones to `problems`. Skip rules that read a field with a problem."""
    wrong = {re.sub(r"\[\d+\]$", "", problem.path) for problem in problems}  # of a list, if an item is wrong
    objects = {one.path: one for one in found}
    for one in found:
        for rule in RULES.get(type(one.value), ()):
            path = f"{one.path}.{rule.path}" if rule.path else one.path
            read: dict[str, Any] = {path: None}
            if not rule.holds(_Stored(one.path, objects, read)) and not any(is_within(name, wrong) for name in read):
                problems.append(Problem(path, rule.expected + _values(read.pop(path), read)))


def _values(got: Any, read: Mapping[str, Any]) -> str:
    """Return the end of a problem's message: the field's value (`got`), and other numbers and texts the rule read."""
    others = [f"{path.rpartition('.')[2]} {show(value)}" for path, value in read.items() if _is_shown(value)]
    return (f", got {show(got)}" if _is_shown(got) else "") + (f" ({', '.join(others)})" if others else "")


def _is_shown(value: Any) -> bool:
    return isinstance(value, int | str)


class _Stored:
    """A proxy through which a rule reads an object as an API server stores it. It records the fields that are read.

    objects: all objects of the manifest, by path. read: collects the path and value of each field that the rule reads.
    """

    def __init__(self, path: str, objects: Mapping[str, ReadObject], read: dict[str, Any]) -> None:
        self._path, self._objects, self._read = path, objects, read

    def __getattr__(self, name: str) -> Any:
        this = self._objects[self._path]
        kind: type = type(this.value)
        one = next((one for one in api_fields(kind) if one.attribute == name), None)
        if one is None:
            return getattr(kind, name).fget(self)
        path = f"{self._path}.{one.name}"
        value = getattr(this.value, one.attribute)
        if Mark.FOLLOWS in one.marks and not isinstance(one.form, Object) and one.name not in this.given:
            value = None
        self._read[path] = value
        match one.form:
            case Object():
                return None if value is None else _Stored(path, self._objects, self._read)
            case ObjectList():
                return [_Stored(f"{path}[{i}]", self._objects, self._read) for i in range(len(value))]
        return value


# Rules of the training


@rule(TrainingSpec, "", "expected exactly one of steps, epochs and tokens")
def _one_length_is_given(t: TrainingSpec) -> bool:
    return (
        (1 if t.steps is not None else 0) + (1 if t.epochs is not None else 0) + (1 if t.tokens is not None else 0)
    ) == 1


@rule(TrainingSpec, "globalBatchSize", "expected a multiple of spec.training.microBatchSize")
def _microbatches_are_whole(t: TrainingSpec) -> bool:
    return t.micro_batch_size <= 0 or t.global_batch_size % t.micro_batch_size == 0


@rule(TrainingSpec, "parameterPrecision", "expected bf16 only with spec.training.precision bf16")
def _parameters_are_rounded_with_layers(t: TrainingSpec) -> bool:
    return t.parameter_precision is ParameterPrecision.FP32 or t.precision is Precision.BF16


@rule(TrainingSpec, "boundaryPrecision", "expected bf16 only with spec.training.precision bf16")
def _boundaries_are_rounded_with_layers(t: TrainingSpec) -> bool:
    return t.boundary_precision is ParameterPrecision.FP32 or t.precision is Precision.BF16


@rule(
    TrainingSpec,
    "gradientGroups",
    "expected at most the number of microbatches in a step (globalBatchSize / microBatchSize)",
)
def _groups_are_of_microbatches(t: TrainingSpec) -> bool:
    return t.gradient_groups is None or t.micro_batch_size <= 0 or t.gradient_groups <= t.microbatches


# Rules of pipelines and the batch: each pipeline runs whole gradient groups. Another rule refuses a step without a
# microbatch.


@rule(
    JobSpec,
    "topology.pipelines",
    f"expected at most spec.training.gradientGroups (by default at most {DEFAULT_GROUPS})",
)
def _pipelines_have_microbatches(job: JobSpec) -> bool:
    return (
        job.training.micro_batch_size <= 0
        or job.training.microbatches == 0
        or job.topology.pipelines is None
        or job.topology.pipelines <= job.training.groups
    )


# Rules of the grid: topology fixes parts of it, and elastic lets the coordinator choose the others


@rule(TopologySpec, "split", "expected a number of layers for each of the stages")
def _split_is_of_the_stages(grid: TopologySpec) -> bool:
    return grid.split is None or grid.stages is None or len(grid.split) == grid.stages


def _stages_are_known(job: JobSpec) -> bool:
    return job.topology.stages is not None or job.topology.split is not None


@rule(JobSpec, "topology.stages", "expected a number of stages, or spec.elastic, with which they are chosen")
def _stages_are_known_or_chosen(job: JobSpec) -> bool:
    return job.elastic is not None or _stages_are_known(job)


@rule(
    JobSpec,
    "topology.pipelines",
    "expected only without spec.topology.stages or without spec.elastic, for which nothing else is left to choose",
)
def _something_is_left_to_choose(job: JobSpec) -> bool:
    return job.elastic is None or job.topology.pipelines is None or not _stages_are_known(job)


@rule(JobSpec, "elastic.minStages", "expected only without a number of stages in spec.topology")
def _bounded_stages_are_chosen(job: JobSpec) -> bool:
    return job.elastic is None or job.elastic.min_stages == 1 or not _stages_are_known(job)


def _fewest_stages(topology: TopologySpec, elastic: ElasticSpec) -> int:
    return (
        topology.stages
        if topology.stages is not None
        else len(topology.split)
        if topology.split is not None
        else elastic.min_stages
    )


@rule(
    JobSpec,
    "elastic.maxWorkers",
    "expected at least the workers of the smallest grid (stages x pipelines)",
)
def _most_workers_are_enough_for_a_grid(job: JobSpec) -> bool:
    return job.elastic is None or job.elastic.max_workers >= _fewest_stages(job.topology, job.elastic) * (
        job.topology.pipelines if job.topology.pipelines is not None else 1
    )


@rule(ElasticSpec, "minWorkers", "expected at most spec.elastic.maxWorkers")
def _fewest_workers_are_no_more_than_most(elastic: ElasticSpec) -> bool:
    return elastic.min_workers <= elastic.max_workers


# Rules of a worker's devices, which each run layers of its stage; a worker with GPUs has as many of them


def _are_gpus(devices: int, asked: Mapping[str, str | int] | None) -> bool:
    return asked is None or all(not n.endswith(GPU_SUFFIX) or str(asked[n]) == str(devices) for n in asked)


@rule(WorkerSpec, "devices", "expected the number of GPUs in spec.worker.resources")
def _devices_are_the_gpus(worker: WorkerSpec) -> bool:
    return (
        worker.devices == 1
        or worker.resources is None
        or (_are_gpus(worker.devices, worker.resources.limits) and _are_gpus(worker.devices, worker.resources.requests))
    )


@rule(JobSpec, "worker.devices", "expected at most the layers of each stage in spec.topology.split")
def _devices_have_layers(job: JobSpec) -> bool:
    return job.topology.split is None or all(n >= job.worker.devices for n in job.topology.split)


# Rules of checkpoints, and of the budget, which needs prices


@rule(JobSpec, "checkpoint.keepBest", "expected only with spec.training.evaluation")
def _the_best_state_is_measured(job: JobSpec) -> bool:
    return job.checkpoint is None or not job.checkpoint.keep_best or job.training.evaluation is not None


@rule(BudgetSpec, "", "expected money or doneBy")
def _a_budget_is_of_something(budget: BudgetSpec) -> bool:
    return budget.money is not None or budget.done_by is not None


@rule(JobSpec, "budget", "expected only doneBy without a pricePerHour in each of spec.nodePools")
def _money_is_of_prices(job: JobSpec) -> bool:
    return (
        job.budget is None
        or job.budget.money is None
        or (
            job.node_pools is not None
            and len(job.node_pools) != 0
            and all(n.price_per_hour is not None for n in job.node_pools)
        )
    )
