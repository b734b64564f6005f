"""The rules between a manifest's fields, each for the parser and, in CEL, for the CRD.

A rule belongs to a type of the API and is judged of each such object. Its two forms say the same of a job in which
every field fits by itself; tests/chart/test_crd_agrees.py holds them together.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bamboo_core.job.fields import Problem
from bamboo_core.job.misspelled_fields import is_within
from bamboo_core.job.model import ReadObject
from bamboo_core.job.placement_spec import WorkerSpec
from bamboo_core.job.spec import (
    BudgetSpec,
    ElasticSpec,
    JobSpec,
    TopologySpec,
    fewest_stages,
    smallest_grid,
)
from bamboo_core.job.training_spec import (
    DEFAULT_GROUPS,
    ParameterPrecision,
    Precision,
    TrainingSpec,
)

T = TypeVar("T")
_READ_IN_CEL = re.compile(r"\bself((?:\.[a-zA-Z]+\b(?!\())+)")  # a field, and no method


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a type of the API.

    path: from the object to the field that is wrong where the rule does not hold; "" is the object. expected: what is
    said of it. problem: what the parser says of an object, with the path from it on. reads: the rule is not judged
    where one of these fields is wrong by itself, or was written under another name.
    """

    path: str
    cel: str
    expected: str
    problem: Callable[[ReadObject], Problem | None]
    reads: frozenset[str]


RULES: dict[type, list[Rule]] = {}  # by their types, in the order in which they are told


def check_rules(found: Sequence[ReadObject], problems: list[Problem], misspelt: Collection[str]) -> None:
    """Add what is wrong in these objects to the problems. misspelt: paths of fields written under another name."""
    wrong = {*misspelt, *(problem.path for problem in problems)}
    for one in found:
        for rule in RULES.get(type(one.value), ()):
            judged = not wrong or not any(is_within(_below(one.path, path), wrong) for path in rule.reads)
            if judged and (problem := rule.problem(one)):
                problems.append(replace(problem, path=_below(one.path, problem.path)))


def _below(path: str, inner: str) -> str:
    return f"{path}.{inner}" if inner else path


def rule(
    kind: type[T],
    path: str,
    expected: str,
    *,
    cel: str,
    got: Callable[[T], str] = lambda value: "",
    said: Callable[[T], str] | None = None,
) -> Callable[[Callable[[T], bool]], Callable[[T], bool]]:
    """Registers what has to hold of an object's values. The rule reads the fields that its CEL names.

    got: what the parser adds to what was expected, with the values. said: what it says instead.
    """
    reads = frozenset({path} | {named.removeprefix(".") for named in _READ_IN_CEL.findall(cel)})

    def register(holds: Callable[[T], bool]) -> Callable[[T], bool]:
        def problem(found: ReadObject) -> Problem | None:
            if holds(found.value):
                return None
            return Problem(path, said(found.value) if said else expected + got(found.value))

        RULES.setdefault(kind, []).append(Rule(path, cel, expected, problem, reads))
        return holds

    return register


# Of the training

_LENGTHS = ("steps", "epochs", "tokens")
_ONE_LENGTH = "expected exactly one of steps, epochs and tokens"


def _length_problem(found: ReadObject) -> Problem | None:
    """Return what is wrong if not exactly one of the lengths is given; one that does not fit counts as given."""
    given = [name for name in _LENGTHS if name in found.given]
    return None if len(given) == 1 else Problem("", f"{_ONE_LENGTH}, got {' and '.join(given) or 'none'}")


_COUNT = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in _LENGTHS)
RULES[TrainingSpec] = [Rule("", f"{_COUNT} == 1", _ONE_LENGTH, _length_problem, frozenset({"", *_LENGTHS}))]


@rule(
    TrainingSpec,
    "globalBatchSize",
    "expected a multiple of spec.training.microBatchSize",
    cel="self.microBatchSize <= 0 || self.globalBatchSize % self.microBatchSize == 0",
    got=lambda t: f" ({t.micro_batch_size}), got {t.global_batch_size}",
)
def _microbatches_are_whole(t: TrainingSpec) -> bool:
    return t.global_batch_size % t.micro_batch_size == 0


@rule(
    TrainingSpec,
    "parameterPrecision",
    "expected bf16 only with spec.training.precision bf16",
    cel="self.parameterPrecision == 'fp32' || self.precision == 'bf16'",
)
def _parameters_are_rounded_with_layers(t: TrainingSpec) -> bool:
    return t.parameter_precision is ParameterPrecision.FP32 or t.precision is Precision.BF16


@rule(
    TrainingSpec,
    "boundaryPrecision",
    "expected bf16 only with spec.training.precision bf16",
    cel="self.boundaryPrecision == 'fp32' || self.precision == 'bf16'",
)
def _boundaries_are_rounded_with_layers(t: TrainingSpec) -> bool:
    return t.boundary_precision is ParameterPrecision.FP32 or t.precision is Precision.BF16


@rule(
    TrainingSpec,
    "gradientGroups",
    "expected only with spec.training.reproducible true",
    cel="!has(self.gradientGroups) || self.reproducible",
)
def _groups_are_for_reproducible_sums(t: TrainingSpec) -> bool:
    return t.gradient_groups is None or t.reproducible


@rule(
    TrainingSpec,
    "gradientGroups",
    "expected at most the number of microbatches in a step (globalBatchSize / microBatchSize)",
    cel="!has(self.gradientGroups) || self.microBatchSize <= 0"
    " || self.gradientGroups <= self.globalBatchSize / self.microBatchSize",
    said=lambda t: f"expected at most {_in_step(t)}, got {t.gradient_groups}",
)
def _groups_are_of_microbatches(t: TrainingSpec) -> bool:
    return t.gradient_groups is None or not _microbatches_are_whole(t) or t.gradient_groups <= t.microbatches


def _in_step(t: TrainingSpec) -> str:
    return f"the number of microbatches in a step ({t.microbatches})"


# Of pipelines and the batch: each pipeline has microbatches of its own, whole groups of them if gradients are summed in
# groups.

_IN_STEP = "self.training.globalBatchSize / self.training.microBatchSize"
_NO_STEP = f"self.training.microBatchSize <= 0 || {_IN_STEP} == 0"  # which other rules refuse
_MOST_GROUPS = DEFAULT_GROUPS - 1
_MOST_PIPELINES = (
    f"(!self.training.reproducible ? {_IN_STEP} : has(self.training.gradientGroups) ? self.training.gradientGroups"
    f" : ({_IN_STEP} + ({_IN_STEP} + {_MOST_GROUPS}) / {DEFAULT_GROUPS} - 1)"
    f" / (({_IN_STEP} + {_MOST_GROUPS}) / {DEFAULT_GROUPS}))"
)
_WITH_BATCH = (
    f"expected at most spec.training.gradientGroups (by default up to {DEFAULT_GROUPS} equal ones; with reproducible"
    " false the number of microbatches in a step)"
)


def _over_batch(job: JobSpec) -> str:
    t = job.training
    grouped = f"spec.training.gradientGroups ({t.most_pipelines})"
    most = _in_step(t) if t.most_pipelines == t.microbatches else grouped
    return f"expected at most {most}, got {job.topology.pipelines}"


@rule(
    JobSpec,
    "topology.pipelines",
    _WITH_BATCH,
    cel=f"{_NO_STEP} || !has(self.topology.pipelines) || self.topology.pipelines <= {_MOST_PIPELINES}",
    said=_over_batch,
)
def _pipelines_have_microbatches(job: JobSpec) -> bool:
    return not _microbatches_are_whole(job.training) or job.topology.pipelines <= job.training.most_pipelines


# Of the grid: what topology fixes, and elastic opens

_FIXED = "(has(self.topology.stages) || has(self.topology.split))"
_FEWEST_STAGES = (
    "(has(self.topology.stages) ? self.topology.stages : has(self.topology.split) ? size(self.topology.split)"
    " : self.elastic.minStages)"
)


@rule(
    TopologySpec,
    "split",
    "expected a number of layers for each of the stages",
    cel="!has(self.split) || !has(self.stages) || size(self.split) == self.stages",
    said=lambda grid: f"expected a number of layers for each of the {grid.stages} stages, got {len(grid.split or ())}",
)
def _split_is_of_the_stages(grid: TopologySpec) -> bool:
    return grid.split is None or len(grid.split) == grid.stages


_UNKNOWN_STAGES = "expected a number of stages, or spec.elastic, with which they are chosen"


@rule(
    JobSpec,
    "topology.stages",
    _UNKNOWN_STAGES,
    cel=f"has(self.elastic) || {_FIXED}",
    said=lambda job: f"required, {_UNKNOWN_STAGES}",
)
def _stages_are_known_or_chosen(job: JobSpec) -> bool:
    return job.elastic is not None or not job.topology.chooses_stages


@rule(
    JobSpec,
    "topology.pipelines",
    "expected only without spec.topology.stages or without spec.elastic, for which nothing else is left to choose",
    cel=f"!has(self.elastic) || !has(self.topology.pipelines) || !{_FIXED}",
)
def _something_is_left_to_choose(job: JobSpec) -> bool:
    return job.elastic is None or job.topology.chooses_stages or job.topology.chooses_pipelines


@rule(
    JobSpec,
    "elastic.minStages",
    "expected only without a number of stages in spec.topology",
    cel=f"!has(self.elastic) || self.elastic.minStages == 1 || !{_FIXED}",
)
def _bounded_stages_are_chosen(job: JobSpec) -> bool:
    return job.elastic is None or job.elastic.min_stages == 1 or job.topology.chooses_stages


@rule(
    JobSpec,
    "elastic.maxWorkers",
    "expected at least the workers of the smallest grid (stages x pipelines)",
    cel=f"!has(self.elastic) || self.elastic.maxWorkers >= {_FEWEST_STAGES}"
    " * (has(self.topology.pipelines) ? self.topology.pipelines : 1)",
    said=lambda job: (
        f"expected at least the {smallest_grid(job)} workers of the smallest grid"
        f" ({fewest_stages(job)} x {job.topology.pipelines}), got {job.elastic and job.elastic.max_workers}"
    ),
)
def _most_workers_are_enough_for_a_grid(job: JobSpec) -> bool:
    return job.elastic is None or job.elastic.max_workers >= smallest_grid(job)


@rule(
    ElasticSpec,
    "minWorkers",
    "expected at most spec.elastic.maxWorkers",
    cel="self.minWorkers <= self.maxWorkers",
    got=lambda elastic: f" ({elastic.max_workers}), got {elastic.min_workers}",
)
def _fewest_workers_are_no_more_than_most(elastic: ElasticSpec) -> bool:
    return elastic.min_workers <= elastic.max_workers


# Of a worker's devices, which each run layers of its stage; it has as many GPUs if it has any


def _asks_for_others(resources: str) -> str:
    """In CEL, that none of these is a number of GPUs other than the devices."""
    same = f"string({resources}[n]) == string(self.devices)"
    return f"(!has({resources}) || {resources}.all(n, !n.endsWith('/gpu') || {same}))"


def _other_gpus(worker: WorkerSpec) -> str | None:
    return next((gpus for gpus in worker.resources.gpus if gpus != str(worker.devices)), None)


@rule(
    WorkerSpec,
    "devices",
    "expected the number of GPUs in spec.worker.resources",
    cel="self.devices == 1 || !has(self.resources)"
    f" || ({_asks_for_others('self.resources.limits')} && {_asks_for_others('self.resources.requests')})",
    got=lambda worker: f" ({_other_gpus(worker)}), got {worker.devices}",
)
def _devices_are_the_gpus(worker: WorkerSpec) -> bool:
    return worker.devices == 1 or _other_gpus(worker) is None


@rule(
    JobSpec,
    "worker.devices",
    "expected at most the layers of each stage in spec.topology.split",
    cel="!has(self.topology.split) || self.topology.split.all(n, n >= self.worker.devices)",
    got=lambda job: f" ({min(job.topology.split or (0,))}), got {job.worker.devices}",
)
def _devices_have_layers(job: JobSpec) -> bool:
    return job.topology.split is None or min(job.topology.split) >= job.worker.devices


# Of checkpoints


@rule(
    JobSpec,
    "checkpoint.keepBest",
    "expected only with spec.training.evaluation",
    cel="!has(self.checkpoint) || !self.checkpoint.keepBest || has(self.training.evaluation)",
)
def _the_best_state_is_measured(job: JobSpec) -> bool:
    return job.checkpoint is None or not job.checkpoint.keep_best or job.training.evaluation is not None


# Of the budget: what has no price cannot be counted.


@rule(
    BudgetSpec,
    "",
    "expected money or doneBy, got none of them",
    cel="has(self.money) || has(self.doneBy)",
)
def _a_budget_is_of_something(budget: BudgetSpec) -> bool:
    return budget.money is not None or budget.done_by is not None


@rule(
    JobSpec,
    "budget",
    "expected only doneBy without a pricePerHour in each of spec.nodePools",
    cel="!has(self.budget) || !has(self.budget.money) || has(self.nodePools)"
    " && self.nodePools.size() != 0 && self.nodePools.all(n, has(n.pricePerHour))",
)
def _money_is_of_prices(job: JobSpec) -> bool:
    if job.budget is None or job.budget.money is None:
        return True
    return bool(job.node_pools) and all(pool.price_per_hour is not None for pool in job.node_pools)
