"""The rules between a manifest's fields."""

from collections.abc import Callable

from bamboo.job.fields import Problem, show
from bamboo.job.placement_spec import VerifyMode
from bamboo.job.spec import JobSpec
from bamboo.job.training_spec import ParameterPrecision, Precision

Rule = Callable[..., None]  # (does it hold?, path, message, other fields that the rule reads)


def check_rules(job: JobSpec, problems: list[Problem]) -> None:
    """Adds what is wrong; a rule is skipped where a field it reads is already wrong."""
    wrong = [problem.path for problem in problems]

    def rule(holds: bool, path: str, message: str, *others: str) -> None:
        read = (path, *others)
        if not holds and not any(p == bad or p.startswith(f"{bad}.") for p in read for bad in wrong):
            problems.append(Problem(path, message))

    _check_batch(job, rule)
    _check_groups(job, rule)
    _check_precision(job, rule)
    _check_evaluation(job, rule)
    _check_size(job, rule)
    _check_shards(job, rule)
    _check_devices(job, rule)
    _check_verify(job, rule)
    _check_names(job, rule)
    _check_budget(job, rule)


def _check_batch(job: JobSpec, rule: Rule) -> None:
    t, micro = job.training, "spec.training.microBatchSize"
    rule(
        t.global_batch_size % t.micro_batch_size == 0,
        "spec.training.globalBatchSize",
        f"expected a multiple of {micro} ({t.micro_batch_size}), got {t.global_batch_size}",
        micro,
    )


def _check_budget(job: JobSpec, rule: Rule) -> None:
    """What has no price cannot be counted, and only a job that may hold fewer workers can heed a limit for the hour."""
    budget, pools = job.budget, job.node_pools
    if budget is None:
        return
    paid = budget.money is not None or budget.money_per_hour is not None
    priced = not paid or (bool(pools) and all(pool.price_per_hour is not None for pool in pools))
    rule(
        priced, "spec.budget", "expected only doneBy without a pricePerHour in each of spec.nodePools", "spec.nodePools"
    )
    rule(
        budget.money_per_hour is None or job.elastic.gives_back,
        "spec.budget.moneyPerHour",
        "expected only with spec.elastic.objective Value, with which a job may hold fewer workers",
        "spec.elastic.objective",
    )


def _check_precision(job: JobSpec, rule: Rule) -> None:
    t, precision = job.training, "spec.training.precision"
    for name, chosen in (("parameter", t.parameter_precision), ("boundary", t.boundary_precision)):
        rule(
            chosen is ParameterPrecision.FP32 or t.precision is Precision.BF16,
            f"spec.training.{name}Precision",
            f"expected {chosen} only with {precision} {chosen}",
            precision,
        )
    rule(
        t.loss_scale is None or t.precision is Precision.FP16,
        "spec.training.lossScale",
        f"expected only with {precision} fp16",
        precision,
    )


def _check_groups(job: JobSpec, rule: Rule) -> None:
    """Each pipeline has microbatches of its own: whole groups of them, if gradients are summed in groups."""
    t, pipelines, high = job.training, job.topology.pipelines, job.elastic.max_pipelines
    batch, micro, groups = (f"spec.training.{name}" for name in ("globalBatchSize", "microBatchSize", "gradientGroups"))
    if t.global_batch_size % t.micro_batch_size:
        return
    in_step = f"the number of microbatches in a step ({t.microbatches})"
    rule(
        t.gradient_groups is None or t.reproducible,
        groups,
        "expected only with spec.training.reproducible true",
        "spec.training.reproducible",
    )
    rule(
        t.gradient_groups is None or t.gradient_groups <= t.microbatches,
        groups,
        f"expected at most {in_step}, got {t.gradient_groups}",
        batch,
        micro,
    )
    enough = in_step if t.most_pipelines == t.microbatches else f"{groups} ({t.most_pipelines})"
    said = f"expected at most {enough}, got"
    rule(pipelines <= t.most_pipelines, "spec.topology.pipelines", f"{said} {pipelines}", batch, micro, groups)
    if high != pipelines:
        rule(high <= t.most_pipelines, "spec.elastic.maxPipelines", f"{said} {high}", batch, micro, groups)
    low = job.elastic.min_pipelines
    if job.topology.chooses_stages:
        rule(low <= t.most_pipelines, "spec.elastic.minPipelines", f"{said} {low}", batch, micro, groups)


def _check_evaluation(job: JobSpec, rule: Rule) -> None:
    evaluation = job.training.evaluation
    rule(
        job.checkpoint is None or not job.checkpoint.keep_best or evaluation is not None,
        "spec.checkpoint.keepBest",
        "expected only with spec.training.evaluation",
        "spec.training.evaluation",
    )


def _check_size(job: JobSpec, rule: Rule) -> None:
    """Stages and pipelines, and the bounds within which they change."""
    if job.topology.chooses_stages:
        _check_chosen(job, rule)
        return
    stages, pipelines, split = job.topology.stages, job.topology.pipelines, job.topology.split
    rule(
        split is None or len(split) == stages,
        "spec.topology.split",
        f"expected a number of layers for each of the {stages} stages, got {len(split or ())}",
        "spec.topology.stages",
    )
    fewest, low, high = job.elastic.min_stages, job.elastic.min_pipelines, job.elastic.max_pipelines
    rule(
        fewest <= stages,
        "spec.elastic.minStages",
        f"expected at most spec.topology.stages ({stages}), got {fewest}",
        "spec.topology.stages",
    )
    count, least, most = "spec.topology.pipelines", "spec.elastic.minPipelines", "spec.elastic.maxPipelines"
    rule(low <= pipelines, least, f"expected at most {count} ({pipelines}), got {low}", count, "spec.topology.stages")
    rule(high >= pipelines, most, f"expected at least {count} ({pipelines}), got {high}", count)
    _check_objective(job, rule)


def _check_chosen(job: JobSpec, rule: Rule) -> None:
    """No stages are given: the bounds within which they and the pipelines are chosen."""
    elastic, pipelines, stages = job.elastic, job.topology.pipelines, "spec.topology.stages"
    least, most, workers = "spec.elastic.minPipelines", "spec.elastic.maxPipelines", "spec.elastic.maxWorkers"
    bounds = f"expected 1 or nothing without a number in {stages}, as they are chosen too, between {least} and {most}"
    rule(pipelines == 1, "spec.topology.pipelines", f"{bounds}; got {pipelines}", stages)
    needs = f"expected another one than None without a number in {stages}"
    rule(elastic.chooses_grid, "spec.elastic.objective", needs, stages)
    fewest, longest = elastic.min_stages, elastic.max_stages
    said = f"expected at least spec.elastic.minStages ({fewest}), got {longest}"
    rule(longest is None or longest >= fewest, "spec.elastic.maxStages", said, "spec.elastic.minStages")
    low, high, cells = elastic.min_pipelines, elastic.max_pipelines, fewest * elastic.min_pipelines
    said = f"expected at least spec.elastic.minStages x minPipelines ({cells}), got {elastic.max_workers}"
    rule((elastic.max_workers or 0) >= cells, workers, said, "spec.elastic.minStages", least, stages)
    rule(low <= high, least, f"expected at most {most} ({high}), got {low}", most, workers)


def _check_objective(job: JobSpec, rule: Rule) -> None:
    """Bounds of grids that only a choice among them has; one without a number of stages has a choice, too."""
    topology, elastic = job.topology, job.elastic
    objective, stages, workers = "spec.elastic.objective", "spec.elastic.maxStages", "spec.elastic.maxWorkers"
    chosen, only = elastic.chooses_grid, "expected only with an objective"
    split = "expected only without spec.topology.split, which fixes the stages"
    rule(not chosen or topology.split is None, objective, split, "spec.topology.split")
    rule(chosen or elastic.max_stages is None, stages, only, objective, "spec.topology.stages")
    rule(chosen or elastic.max_workers is None, workers, only, objective, "spec.topology.stages")
    most = elastic.most_stages(topology)
    least = f"expected at least spec.topology.stages ({topology.stages}), got {most}"
    rule(most >= topology.stages, stages, least, "spec.topology.stages")
    whole = topology.stages * topology.pipelines
    least = f"expected at least spec.topology.stages x pipelines ({whole}), got {elastic.max_workers}"
    rule(elastic.most_workers(topology) >= whole, workers, least, "spec.topology.stages", "spec.topology.pipelines")
    one = f"expected 1 with spec.topology.shardOptimizer, got {most}"
    rule(not topology.shard_optimizer or topology.stages > 1 or most == 1, stages, one, "spec.topology.shardOptimizer")


def _several(job: JobSpec) -> str:
    return "several" if job.topology.chooses_stages else str(job.topology.stages)


def _check_shards(job: JobSpec, rule: Rule) -> None:
    """A shard needs a second holder, and the workers of several stages hold no more than their stage's state anyway."""
    shard, stages = job.topology.shard_optimizer, "spec.topology.stages"
    rule(
        not shard or (job.topology.stages == 1 and not job.topology.chooses_stages),
        "spec.topology.shardOptimizer",
        f"expected only with {stages} 1; {_several(job)} stages divide the optimizer's state already",
        stages,
    )
    rule(
        not shard or job.redundancy.kept > 0,
        "spec.topology.shardOptimizer",
        "expected only with another spec.redundancy.mode than None, or every shard would be lost with its one holder",
        "spec.redundancy.mode",
    )


def _check_devices(job: JobSpec, rule: Rule) -> None:
    """A worker's devices each run layers of its stage, and it has as many GPUs if it has any."""
    devices, path = job.worker.devices, "spec.worker.devices"
    shard, split, resources = "spec.topology.shardOptimizer", "spec.topology.split", "spec.worker.resources"
    other = next((gpus for gpus in job.worker.resources.gpus if gpus != str(devices)), None)
    rule(
        devices == 1 or other is None,
        path,
        f"expected the number of GPUs in {resources} ({other}), got {devices}",
        f"{resources}.limits",
        f"{resources}.requests",
    )
    rule(
        devices == 1 or not job.topology.shard_optimizer,
        path,
        f"expected 1 with {shard}, which divides the state of workers of one device; several divide it already",
        shard,
    )
    fewest = min(job.topology.split or (devices,))
    rule(
        fewest >= devices,
        path,
        f"expected at most the layers of each stage in {split} ({fewest}), got {devices}",
        split,
    )


def _check_verify(job: JobSpec, rule: Rule) -> None:
    """Only what is deterministic can be compared, and wrong results are undone by going back to a checkpoint."""
    verify, path = job.redundancy.verify, "spec.redundancy.verify"
    rule(
        verify is VerifyMode.NONE or job.training.deterministic,
        path,
        "expected None with spec.training.deterministic false, with which equal work need not give equal results",
        "spec.training.deterministic",
    )
    rule(
        verify is not VerifyMode.REPLACE or job.checkpoint is not None,
        path,
        "expected Replace only with spec.checkpoint, to which the job goes back",
        "spec.checkpoint",
    )


def _check_names(job: JobSpec, rule: Rule) -> None:
    """No two node pools, and no two rules of the failure policy, have the same name."""
    for path, names in (
        ("spec.training.loggers", [one.name for one in job.training.loggers]),
        ("spec.nodePools", [pool.name for pool in job.node_pools]),
        ("spec.failurePolicy.rules", [r.name for r in job.failure_policy.rules]),
    ):
        for i, name in enumerate(names):
            first = names.index(name)
            used = f"{path}[{first}].name"
            rule(first == i, f"{path}[{i}].name", f"{show(name)} is already used by {used}", used)
