"""The rules between a manifest's fields, each for the parser and, in CEL, for the CRD.

A rule belongs to a type of the API and is judged of each such object. Its two forms say the same of a job in which
every field fits by itself; tests/chart/test_crd_agrees.py holds them together.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bamboo_core.job.fields import Problem
from bamboo_core.job.model import ReadObject
from bamboo_core.job.placement_spec import WorkerSpec
from bamboo_core.job.spec import AUTO, BudgetSpec, InitialSpec, JobSpec, StorageSpec, TopologySpec
from bamboo_core.job.training_spec import (
    DEFAULT_GROUPS,
    LoggerSpec,
    LoggerType,
    ParameterPrecision,
    Precision,
    TrainingSpec,
    Unit,
    Until,
)

T = TypeVar("T")
_READ_IN_CEL = re.compile(r"\bself((?:\.[a-zA-Z]+\b(?!\())+)")  # a field, and no method


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a type of the API.

    path: from the object to the field that is wrong where the rule does not hold; "" is the object. expected: what is
    said of it. problem: what the parser says of an object, with the path from it on. reads: the rule is not judged
    where one of these fields is wrong by itself.
    """

    path: str
    cel: str
    expected: str
    problem: Callable[[ReadObject], Problem | None]
    reads: frozenset[str]


RULES: dict[type, list[Rule]] = {}  # by their types, in the order in which they are told


def check_rules(found: Sequence[ReadObject], problems: list[Problem]) -> None:
    """Adds what is wrong in these objects."""
    wrong = [problem.path for problem in problems]

    def is_wrong(path: str) -> bool:
        return any(path == bad or path.startswith(f"{bad}.") for bad in wrong)

    for one in found:
        for rule in RULES.get(type(one.value), ()):
            judged = not wrong or not any(is_wrong(_below(one.path, path)) for path in rule.reads)
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
    because: str = "",
) -> Callable[[Callable[[T], bool]], Callable[[T], bool]]:
    """Registers what has to hold of an object's values. The rule reads the fields that its CEL names.

    got: what the parser adds to what was expected, with the values. said: what it says instead. because: see `Problem`.
    """
    reads = frozenset({path} | {named.removeprefix(".") for named in _READ_IN_CEL.findall(cel)})

    def register(holds: Callable[[T], bool]) -> Callable[[T], bool]:
        def problem(found: ReadObject) -> Problem | None:
            if holds(found.value):
                return None
            return Problem(path, said(found.value) if said else expected + got(found.value), because=because)

        RULES.setdefault(kind, []).append(Rule(path, cel, expected, problem, reads))
        return holds

    return register


def _exactly_one(kind: type, *names: str, or_missing: bool = False) -> None:
    """Registers that one of these fields is said, right or wrong. or_missing: that none is was told already."""
    two = len(names) == 2
    expected = f"expected exactly one of {' and '.join(names) if two else ', '.join(names)}"

    def problem(found: ReadObject) -> Problem | None:
        given = [name for name in names if name in found.given]
        if len(given) == 1 or (or_missing and not given):
            return None
        got = ("both" if given else "neither") if two else " and ".join(given) or "none"
        return Problem("", f"{expected}, got {got}")

    count = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in names)
    cel = f"has(self.{names[0]}) != has(self.{names[1]})" if two else f"{count} == 1"
    RULES.setdefault(kind, []).append(Rule("", cel, expected, problem, frozenset({""})))


# Of the training

_exactly_one(TrainingSpec, "steps", "until", or_missing=True)
_exactly_one(Until, *Unit)


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
    "lossScale",
    "expected only with spec.training.precision fp16",
    cel="!has(self.lossScale) || self.precision == 'fp16'",
)
def _losses_are_scaled_in_fp16(t: TrainingSpec) -> bool:
    return t.loss_scale is None or t.precision is Precision.FP16


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


@rule(
    LoggerSpec,
    "entrypoint",
    "expected with type Custom, and only with it",
    cel="(self.type == 'Custom') == has(self.entrypoint)",
)
def _custom_loggers_have_an_entrypoint(logger: LoggerSpec) -> bool:
    return (logger.type is LoggerType.CUSTOM) == (logger.entrypoint is not None)


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


def _fits_batch(job: JobSpec, pipelines: int) -> bool:
    return not _microbatches_are_whole(job.training) or pipelines <= job.training.most_pipelines


def _over_batch(job: JobSpec, pipelines: int) -> str:
    t = job.training
    grouped = f"spec.training.gradientGroups ({t.most_pipelines})"
    return f"expected at most {_in_step(t) if t.most_pipelines == t.microbatches else grouped}, got {pipelines}"


@rule(
    JobSpec,
    "topology.pipelines",
    _WITH_BATCH,
    cel=f"{_NO_STEP} || self.topology.pipelines <= {_MOST_PIPELINES}",
    said=lambda job: _over_batch(job, job.topology.pipelines),
)
def _pipelines_have_microbatches(job: JobSpec) -> bool:
    return _fits_batch(job, job.topology.pipelines)


@rule(
    JobSpec,
    "elastic.maxPipelines",
    _WITH_BATCH,
    cel=f"{_NO_STEP} || !has(self.elastic.maxPipelines) || self.elastic.maxPipelines == self.topology.pipelines"
    f" || self.elastic.maxPipelines <= {_MOST_PIPELINES}",
    said=lambda job: _over_batch(job, job.elastic.max_pipelines),
)
def _most_pipelines_have_microbatches(job: JobSpec) -> bool:
    return job.elastic.max_pipelines == job.topology.pipelines or _fits_batch(job, job.elastic.max_pipelines)


@rule(
    JobSpec,
    "elastic.minPipelines",
    _WITH_BATCH,
    cel=f"{_NO_STEP} || !has(self.elastic.minPipelines) || self.elastic.minPipelines <= self.topology.pipelines"
    f" || self.elastic.minPipelines <= {_MOST_PIPELINES}",
    said=lambda job: _over_batch(job, job.elastic.min_pipelines),
)
def _fewest_pipelines_have_microbatches(job: JobSpec) -> bool:
    return not job.topology.chooses_stages or _fits_batch(job, job.elastic.min_pipelines)


# Of stages and pipelines, and the bounds within which they change

_CHOSEN = f"string(self.topology.stages) == '{AUTO}'"  # if there is no split
_GIVEN = f"string(self.topology.stages) != '{AUTO}'"
_OBJECTIVE = f"has(self.elastic.objective) ? self.elastic.objective != 'None' : {_CHOSEN} && !has(self.topology.split)"


@rule(
    TopologySpec,
    "split",
    "expected a number of layers for each of the stages",
    cel=f"!has(self.split) || string(self.stages) == '{AUTO}' || size(self.split) == self.stages",
    said=lambda grid: f"expected a number of layers for each of the {grid.stages} stages, got {len(grid.split or ())}",
)
def _split_is_of_the_stages(grid: TopologySpec) -> bool:
    return grid.split is None or len(grid.split) == grid.stages


@rule(
    JobSpec,
    "elastic.minStages",
    "expected at most spec.topology.stages",
    cel=f"{_CHOSEN} ? !has(self.topology.split) || self.elastic.minStages <= size(self.topology.split)"
    " : self.elastic.minStages <= self.topology.stages",
    got=lambda job: f" ({job.topology.stages}), got {job.elastic.min_stages}",
)
def _fewest_stages_are_no_more_than_stages(job: JobSpec) -> bool:
    return job.topology.chooses_stages or job.elastic.min_stages <= job.topology.stages


@rule(
    JobSpec,
    "elastic.minPipelines",
    "expected at most spec.topology.pipelines",
    cel="!has(self.elastic.minPipelines) || self.elastic.minPipelines <= self.topology.pipelines"
    f" || ({_CHOSEN} && !has(self.topology.split))",
    got=lambda job: f" ({job.topology.pipelines}), got {job.elastic.min_pipelines}",
)
def _fewest_pipelines_are_no_more_than_pipelines(job: JobSpec) -> bool:
    return job.topology.chooses_stages or job.elastic.min_pipelines <= job.topology.pipelines


@rule(
    JobSpec,
    "elastic.maxPipelines",
    "expected at least spec.topology.pipelines",
    cel="!has(self.elastic.maxPipelines) || self.elastic.maxPipelines >= self.topology.pipelines",
    got=lambda job: f" ({job.topology.pipelines}), got {job.elastic.max_pipelines}",
)
def _most_pipelines_are_no_fewer_than_pipelines(job: JobSpec) -> bool:
    return job.topology.chooses_stages or job.elastic.max_pipelines >= job.topology.pipelines


@rule(
    JobSpec,
    "elastic.minPipelines",
    "expected at most spec.elastic.maxPipelines",
    cel="!has(self.elastic.minPipelines) || !has(self.elastic.maxPipelines)"
    " || self.elastic.minPipelines <= self.elastic.maxPipelines",
    got=lambda job: f" ({job.elastic.max_pipelines}), got {job.elastic.min_pipelines}",
)
def _fewest_pipelines_are_no_more_than_most(job: JobSpec) -> bool:
    unbounded = job.elastic.max_workers is None  # which another rule refuses
    fits = job.elastic.min_pipelines <= job.elastic.max_pipelines
    return not job.topology.chooses_stages or unbounded or fits


@rule(
    JobSpec,
    "topology.pipelines",
    "expected 1 or nothing without a number in spec.topology.stages, as they are chosen too, between"
    " spec.elastic.minPipelines and spec.elastic.maxPipelines",
    cel=f"{_GIVEN} || has(self.topology.split) || self.topology.pipelines == 1",
    got=lambda job: f"; got {job.topology.pipelines}",
)
def _pipelines_are_chosen_with_stages(job: JobSpec) -> bool:
    return not job.topology.chooses_stages or job.topology.pipelines == 1


@rule(
    JobSpec,
    "elastic.objective",
    "expected another one than None without a number in spec.topology.stages",
    cel=f"!has(self.elastic.objective) || self.elastic.objective != 'None' || {_GIVEN} || has(self.topology.split)",
)
def _chosen_stages_have_an_objective(job: JobSpec) -> bool:
    return not job.topology.chooses_stages or job.elastic.chooses_grid


@rule(
    JobSpec,
    "elastic.objective",
    "expected only without spec.topology.split, which fixes the stages",
    cel="!has(self.elastic.objective) || self.elastic.objective == 'None' || !has(self.topology.split)",
)
def _split_stages_are_not_chosen(job: JobSpec) -> bool:
    return not job.elastic.chooses_grid or job.topology.split is None


def _bounds_are_of_a_choice(job: JobSpec) -> bool:
    """Where the stages are chosen an objective that is None is what is wrong, and not its bounds."""
    return job.topology.chooses_stages or job.elastic.chooses_grid


@rule(
    JobSpec,
    "elastic.maxStages",
    "expected only with an objective",
    cel=f"!has(self.elastic.maxStages) || ({_OBJECTIVE})",
)
def _most_stages_are_of_a_choice(job: JobSpec) -> bool:
    return job.elastic.max_stages is None or _bounds_are_of_a_choice(job)


@rule(
    JobSpec,
    "elastic.maxStages",
    "expected at least spec.topology.stages",
    cel=f"!has(self.elastic.maxStages) || {_CHOSEN} || self.elastic.maxStages >= self.topology.stages",
    got=lambda job: f" ({job.topology.stages}), got {job.elastic.max_stages}",
)
def _most_stages_are_no_fewer_than_stages(job: JobSpec) -> bool:
    most = job.elastic.max_stages
    return most is None or job.topology.chooses_stages or most >= job.topology.stages


@rule(
    JobSpec,
    "elastic.maxStages",
    "expected at least spec.elastic.minStages",
    cel=f"!has(self.elastic.maxStages) || {_GIVEN} || self.elastic.maxStages >= self.elastic.minStages",
    got=lambda job: f" ({job.elastic.min_stages}), got {job.elastic.max_stages}",
)
def _most_stages_are_no_fewer_than_fewest(job: JobSpec) -> bool:
    most = job.elastic.max_stages
    return most is None or not job.topology.chooses_stages or most >= job.elastic.min_stages


@rule(
    JobSpec,
    "elastic.maxWorkers",
    "expected only with an objective",
    cel=f"!has(self.elastic.maxWorkers) || ({_OBJECTIVE})",
)
def _most_workers_are_of_a_choice(job: JobSpec) -> bool:
    return job.elastic.max_workers is None or _bounds_are_of_a_choice(job)


_UNBOUNDED = (
    "expected the most workers that the job may have, as spec.topology.stages says no number of stages and so the"
    " coordinator chooses them"
)


@rule(
    JobSpec,
    "elastic.maxWorkers",
    _UNBOUNDED,
    cel=f"has(self.elastic.maxWorkers) || {_GIVEN} || has(self.topology.split)",
    said=lambda job: f"required, {_UNBOUNDED}",
    because="spec.topology.stages",
)
def _chosen_grids_are_bounded(job: JobSpec) -> bool:
    return job.elastic.max_workers is not None or not job.topology.chooses_stages


@rule(
    JobSpec,
    "elastic.maxWorkers",
    "expected at least spec.topology.stages x pipelines",
    cel=f"!has(self.elastic.maxWorkers) || {_CHOSEN} || self.topology.stages <= 0"
    " || self.elastic.maxWorkers / self.topology.stages >= self.topology.pipelines",
    got=lambda job: f" ({job.topology.stages * job.topology.pipelines}), got {job.elastic.max_workers}",
)
def _most_workers_are_enough_for_the_grid(job: JobSpec) -> bool:
    most, whole = job.elastic.max_workers, job.topology.stages * job.topology.pipelines
    return most is None or job.topology.chooses_stages or most >= whole


@rule(
    JobSpec,
    "elastic.maxWorkers",
    "expected at least spec.elastic.minStages x minPipelines",
    cel=f"!has(self.elastic.maxWorkers) || {_GIVEN} || self.elastic.minStages <= 0"
    " || self.elastic.maxWorkers / self.elastic.minStages"
    " >= (has(self.elastic.minPipelines) ? self.elastic.minPipelines : 1)",
    got=lambda job: f" ({job.elastic.min_stages * job.elastic.min_pipelines}), got {job.elastic.max_workers}",
)
def _most_workers_are_enough_for_the_fewest(job: JobSpec) -> bool:
    most, fewest = job.elastic.max_workers, job.elastic.min_stages * job.elastic.min_pipelines
    return most is None or not job.topology.chooses_stages or most >= fewest


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


# Of first values


@rule(InitialSpec, "", "expected url or job", cel="has(self.url) || has(self.job)")
def _first_values_are_somewhere(initial: InitialSpec) -> bool:
    return initial.url is not None or initial.job is not None


@rule(InitialSpec, "best", "expected only with job", cel="!self.best || has(self.job)")
def _the_best_of_a_job(initial: InitialSpec) -> bool:
    return not initial.best or initial.job is not None


# Of checkpoints

_exactly_one(StorageSpec, "uri", "persistentVolumeClaim")


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
