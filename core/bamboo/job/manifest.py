"""The one parser of BambooJob manifests: raw document -> `JobSpec`, or every problem in it at once.

Unknown fields are errors; null means absent, as in Kubernetes. `status` and the server's metadata pass.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from bamboo.job import placement_spec as placement
from bamboo.job import spec as s
from bamboo.job import training_spec as t
from bamboo.job.fields import MAX_INT, MAX_INT64, Fields, ManifestError, Problem, UnknownField, join, show
from bamboo.job.manifest_rules import check_rules
from bamboo.job.misspelled_fields import causes_first
from bamboo.job.spec import MOST_LAYERS
from bamboo.job.text_patterns import (
    DATE_TIME,
    DECIMAL,
    DNS_LABEL,
    DNS_NAME,
    ENTRYPOINT,
    IMAGE,
    LABEL_KEY,
    MACHINE,
    MANAGER,
    METRIC,
    MONEY,
    URI,
    exactly,
)
from bamboo.job.yaml_file import ManifestSource, load_document, read_manifest_source
from bamboo.names import API_VERSION, KIND
from bamboo.storage.url import shown_url

__all__ = ["ManifestError", "Problem", "load_manifest", "parse_manifest", "parse_source", "read_manifest"]

Check = Callable[[s.JobSpec], Sequence[Problem]]

METADATA = (
    *("name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences", "uid"),
    *(
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ),
    *("managedFields", "selfLink"),
)


def load_manifest(path: str | Path) -> s.JobSpec:
    """Reads one YAML or JSON file. Raises ManifestError for whatever is wrong with it."""
    return parse_manifest(load_document(str(path)))


def read_manifest(path: str) -> tuple[s.JobSpec, dict[str, Any]]:
    """A file's job and its document; - is standard input. The problems of its ManifestError name file and line."""
    source = read_manifest_source(path)
    return parse_source(source), copy.deepcopy(source.document)


def parse_source(source: ManifestSource, also: Check = lambda job: ()) -> s.JobSpec:
    """A file's job. The problems of its ManifestError name file and line."""
    try:
        return parse_manifest(source.document, also)
    except ManifestError as error:
        raise ManifestError(*map(source.place, error.problems)) from None


def parse_manifest(document: Mapping[str, Any], also: Check = lambda job: ()) -> s.JobSpec:
    """Raises ManifestError with all problems of the document; misspelt fields first, as they may be why others miss.

    also: finds more of them in the job, in which harmless values stand for those that have a problem.
    """
    problems: list[Problem] = []
    job = _root(document, problems)
    check_rules(job, problems)
    if found := [*causes_first(problems, _levels(), document), *also(job)]:
        raise ManifestError(*found)
    return job


@cache
def _levels() -> dict[str, tuple[str, ...]]:
    """Where fields of each name belong, such as steps: spec.training.steps. Not those of objects in lists."""
    probe = "?"  # no field has that name, so each object tells those that it has
    parts = ("task", "training", "topology", "elastic", "redundancy", "standby", "spread", "rollout", "queue", "budget")
    document: dict[str, Any] = {part: {probe: 0} for part in parts}
    document["worker"] = {probe: 0, "resources": {probe: 0}}
    document["failurePolicy"] = {probe: 0}
    document["training"] = {probe: 0} | {part: {probe: 0} for part in ("evaluation", "until", "ema", "lossScale")}
    document["checkpoint"] = {probe: 0, "storage": {probe: 0, "persistentVolumeClaim": {probe: 0}}}
    problems: list[Problem] = []
    _root({probe: 0, "metadata": {probe: 0}, "spec": {probe: 0, **document}}, problems)
    found: dict[str, tuple[str, ...]] = {}
    for problem in problems:
        if isinstance(problem, UnknownField):
            above = problem.path.removesuffix(f"[{show(probe)}]").removesuffix("manifest")
            for name in problem.known:
                found[name] = tuple(sorted({*found.get(name, ()), join(above, name)}))
    return found


def _root(document: Mapping[str, Any], problems: list[Problem]) -> s.JobSpec:
    root = Fields(document, "", problems)
    root.text("apiVersion", exactly(API_VERSION))
    root.text("kind", exactly(KIND))
    root.known.append("status")
    metadata = root.child("metadata")
    metadata.known.extend(METADATA)
    name = metadata.text("name", DNS_LABEL)
    namespace = metadata.optional_text("namespace", DNS_LABEL) or "default"
    metadata.close()
    job = _job(root.child("spec"), name, namespace)
    root.close()
    return job


# The tables: one function per object of the API


def _job(f: Fields, name: str, namespace: str) -> s.JobSpec:
    topology, training = _topology(f.child("topology")), _training(f.child("training"))
    elastic = _elastic(f.child("elastic"), topology, training)
    if topology.chooses_stages:
        topology = replace(topology, stages=elastic.min_stages)
    job = s.JobSpec(
        name=name,
        namespace=namespace,
        suspend=f.flag("suspend"),
        managed_by=f.optional_text("managedBy", MANAGER) or s.DEFAULT_MANAGER,
        task=_task(f.child("task")),
        training=training,
        topology=topology,
        elastic=elastic,
        redundancy=_redundancy(f.child("redundancy")),
        standby=_standby(f.child("standby")),
        node_pools=f.items("nodePools", _node_pool, most=16),
        spread=_spread(f.child("spread")),
        checkpoint=_checkpoint(f.child("checkpoint")) if f.has("checkpoint") else None,
        worker=_worker(f.child("worker")),
        rollout=_rollout(f.child("rollout")),
        queue=_queue(f.child("queue")) if f.has("queue") else None,
        budget=_budget(f.child("budget")) if f.has("budget") else None,
        failure_policy=_failure_policy(f.child("failurePolicy")),
        active_deadline_seconds=f.optional_integer("activeDeadlineSeconds"),
        progress_deadline_seconds=f.integer("progressDeadlineSeconds", 1800),
        ttl_seconds_after_finished=f.optional_integer("ttlSecondsAfterFinished", low=0),
        clean_pod_policy=f.choice("cleanPodPolicy", placement.CleanPodPolicy.RUNNING),
        disruption_budget=f.choice("disruptionBudget", placement.DisruptionBudget.ONE_AT_A_TIME),
    )
    f.close()
    return job


def _task(f: Fields) -> s.TaskSpec:
    return f.closed(s.TaskSpec(entrypoint=f.text("entrypoint", ENTRYPOINT), config=f.tree("config")))


def _training(f: Fields) -> t.TrainingSpec:
    batch, until = f.integer("globalBatchSize"), _until(f.child("until")) if f.has("until") else None
    said, steps = f.has("steps"), f.optional_integer("steps") if until else f.integer("steps")
    if said and until:
        f.problem("", "expected exactly one of steps and until, got both")
    return f.closed(
        t.TrainingSpec(
            steps=t.training_steps(until, batch) if until else steps or 1,
            global_batch_size=batch,
            until=until,
            micro_batch_size=f.integer("microBatchSize"),
            seed=f.integer("seed", 0, low=0, high=MAX_INT64),
            precision=f.choice("precision", t.Precision.FP32),
            parameter_precision=f.choice("parameterPrecision", t.ParameterPrecision.FP32),
            boundary_precision=f.choice("boundaryPrecision", t.ParameterPrecision.FP32),
            gradient_precision=f.choice("gradientPrecision", t.ParameterPrecision.FP32),
            max_gradient_norm=f.optional_positive("maxGradientNorm"),
            non_finite=f.choice("nonFinite", t.NonFinite.FAIL),
            max_consecutive_skips=f.integer("maxConsecutiveSkips", 10, high=t.MOST_SKIPS),
            evaluation=_evaluation(f.child("evaluation")) if f.has("evaluation") else None,
            loggers=f.items("loggers", _logger, most=8),
            ema=_ema(f.child("ema")) if f.has("ema") else None,
            reproducible=f.flag("reproducible", default=True),
            gradient_groups=f.optional_integer("gradientGroups"),
            deterministic=f.flag("deterministic", default=True),
            compile=f.flag("compile"),
            loss_scale=_loss_scale(f.child("lossScale")) if f.has("lossScale") else None,
        )
    )


def _until(f: Fields) -> t.Until:
    given: dict[t.Unit, int] = {}
    for unit in t.Unit:
        amount = f.optional_integer(unit, high=MAX_INT if unit is t.Unit.STEPS else MAX_INT64)
        if amount is not None:
            given[unit] = amount
    named = [unit for unit in t.Unit if f.has(unit)]
    if len(named) != 1:
        got = " and ".join(named) or "none"
        f.problem("", f"expected exactly one of {', '.join(t.Unit)}, got {got}")
    unit = next(iter(given), t.Unit.STEPS)  # one that does not fit is told already
    return f.closed(t.Until(unit=unit, amount=given.get(unit, 1)))


def _loss_scale(f: Fields) -> t.LossScaleSpec:
    return f.closed(
        t.LossScaleSpec(
            initial_power=f.integer("initialPower", 16, low=0, high=t.MOST_SCALE_POWER),
            growth_interval=f.integer("growthInterval", 2000),
        )
    )


def _ema(f: Fields) -> float:
    decay = f.optional_positive("decay")
    if decay is None and not f.has("decay"):
        f.problem("decay", "required, expected a number > 0 and < 1")
    elif decay is not None and decay >= 1:
        f.problem("decay", f"expected a number > 0 and < 1, got {show(f.get('decay'))}")
    return f.closed(decay if decay is not None and decay < 1 else 0.5)


def _evaluation(f: Fields) -> t.EvaluationSpec:
    return f.closed(
        t.EvaluationSpec(
            every_steps=f.integer("everySteps"),
            batches=f.optional_integer("batches"),
            metric=f.optional_text("metric", METRIC) or "loss",
            goal=f.choice("goal", t.Goal.MIN),
            patience=f.optional_integer("patience"),
            min_delta=f.optional_positive("minDelta") or 0.0,
        )
    )


def _logger(f: Fields) -> t.LoggerSpec:
    name, kind = f.text("name", DNS_LABEL), f.choice("type", t.LoggerType.CUSTOM, required=True)
    custom, said = kind is t.LoggerType.CUSTOM, f.has("entrypoint")
    entrypoint = f.optional_text("entrypoint", ENTRYPOINT)
    if custom != said and f.get("type") in list(t.LoggerType):
        f.problem("entrypoint", "expected with type Custom, and only with it")
    return f.closed(t.LoggerSpec(name=name, type=kind, entrypoint=entrypoint, config=f.tree("config")))


def _topology(f: Fields) -> s.TopologySpec:
    """As many stages as the split has, if it has one and no number is given."""
    split = f.integers("split", "layers of each stage", high=MOST_LAYERS) if f.has("split") else None
    stages = f.integer_or("stages", s.AUTO, high=s.MOST_STAGES)
    chooses = split is None and f.get("stages") in (None, s.AUTO)
    if stages is None and split is not None:
        stages = len(split)
    return f.closed(
        s.TopologySpec(
            stages=stages or 1,
            chooses_stages=chooses,
            pipelines=f.integer("pipelines", 1, high=1024),
            lookahead=f.integer("lookahead", 1, low=0, high=4),
            schedule=f.choice("schedule", s.ScheduleChoice.AUTO),
            flows_per_link=f.integer("flowsPerLink", 4, high=16),
            split=split,
            shard_optimizer=f.flag("shardOptimizer"),
            transport=f.choice("transport", placement.TransportType.TCP),
        )
    )


UNBOUNDED = (
    "required, expected the most workers that the job may have, as spec.topology.stages says no number of stages and "
    "so the coordinator chooses them"
)


def _elastic(f: Fields, topology: s.TopologySpec, training: t.TrainingSpec) -> s.ElasticSpec:
    """With an objective pipelines have no bounds but those of the workers and of the batch.

    Where the manifest says no number of stages there is one, and workers have to be bounded.
    """
    auto = topology.chooses_stages
    objective = f.choice("objective", s.Objective.THROUGHPUT if auto else s.Objective.NONE)
    fewest, most_workers = f.integer("minStages", 1, high=1024), f.optional_integer("maxWorkers", high=s.MOST_WORKERS)
    if auto and most_workers is None and not f.has("maxWorkers"):
        f.problem("maxWorkers", UNBOUNDED, because="spec.topology.stages")
    low = high = topology.pipelines
    if objective is not s.Objective.NONE:
        workers = most_workers or topology.stages * topology.pipelines
        low, high = 1, max(high, min(workers // fewest, 1024, training.most_pipelines if training.microbatches else 1))
    return f.closed(
        s.ElasticSpec(
            objective=objective,
            min_pipelines=f.integer("minPipelines", low, high=1024),
            max_pipelines=f.integer("maxPipelines", high, high=1024),
            min_stages=fewest,
            max_stages=f.optional_integer("maxStages", high=1024),
            max_workers=most_workers,
            stabilization_seconds=f.integer("stabilizationSeconds", 120, low=0),
            straggler_policy=f.choice("stragglerPolicy", s.StragglerPolicy.MITIGATE),
        )
    )


def _redundancy(f: Fields) -> s.RedundancySpec:
    return f.closed(
        s.RedundancySpec(
            mode=f.choice("mode", s.RedundancyMode.EAGER_FORWARD),
            replicas=f.integer("replicas", 1, high=s.MOST_REPLICAS),
            placement=f.choice("placement", s.ReplicaPlacement.DEVICE),
            transfer_mbps=f.integer("transferMBps", 500, high=1_000_000),
            verify=f.choice("verify", placement.VerifyMode.NONE),
        )
    )


def _standby(f: Fields) -> s.StandbySpec:
    workers, stages = (f.integer(name, 0, low=0, high=1024) for name in ("workers", "stages"))
    return f.closed(s.StandbySpec(workers=workers, stages=stages))


def _node_pool(f: Fields) -> placement.NodePool:
    price = f.optional_text("pricePerHour", DECIMAL)
    return f.closed(
        placement.NodePool(
            name=f.text("name", DNS_LABEL),
            capacity=f.choice("capacity", placement.Capacity.SPOT),
            preset=f.choice("preset", placement.Preset.NONE),
            price_per_hour=None if price is None else Decimal(price),
            machine=f.optional_text("machine", MACHINE),
            after_seconds=f.integer("afterSeconds", 0, low=0),
            max_workers=f.optional_integer("maxWorkers"),
            revert=f.flag("revert"),
        )
    )


def _spread(f: Fields) -> placement.SpreadSpec:
    key = f.optional_text("topologyKey", LABEL_KEY) or "topology.kubernetes.io/zone"
    return f.closed(
        placement.SpreadSpec(
            topology_key=key,
            policy=f.choice("policy", placement.SpreadPolicy.INTERLEAVE),
            workers_per_node=f.integer("workersPerNode", 1, high=placement.MOST_WORKERS_PER_NODE),
        )
    )


def _checkpoint(f: Fields) -> s.CheckpointSpec:
    return f.closed(
        s.CheckpointSpec(
            storage=_storage(f.child("storage")),
            every_steps=f.optional_integer("everySteps"),
            keep_latest=f.integer("keepLatest", 3, high=10_000),
            keep_in_memory=f.flag("keepInMemory", default=True),
            keep_best=f.flag("keepBest"),
            resume=f.choice("resume", s.Resume.LATEST),
            allow_other_data=f.flag("allowOtherData"),
        )
    )


def _storage(f: Fields) -> s.StorageSpec:
    kinds = ("uri", "persistentVolumeClaim")
    given = [kind for kind in kinds if f.has(kind)]
    if len(given) != 1:
        f.problem("", f"expected exactly one of uri and persistentVolumeClaim, got {'both' if given else 'neither'}")
    claim = None
    if f.has("persistentVolumeClaim"):
        volume = f.child("persistentVolumeClaim")
        claim = volume.closed(volume.text("claimName", DNS_NAME))
    f.known.extend(kinds)
    return f.closed(s.StorageSpec(uri=f.optional_text("uri", URI, shown=shown_url), claim_name=claim))


def _worker(f: Fields) -> placement.WorkerSpec:
    resources = f.child("resources")
    limits, requests = resources.quantities("limits"), resources.quantities("requests")
    resources.close()
    image, template = f.optional_text("image", IMAGE), f.tree("template")
    spec = placement.ResourcesSpec(limits=limits, requests=requests)
    mixed, devices = f.flag("allowMixedPlatforms"), f.integer("devices", 1, high=placement.MOST_DEVICES)
    return f.closed(
        placement.WorkerSpec(
            image=image, resources=spec, template=template, allow_mixed_platforms=mixed, devices=devices
        )
    )


def _rollout(f: Fields) -> placement.RolloutSpec:
    return f.closed(
        placement.RolloutSpec(
            paused=f.flag("paused"),
            max_surge=f.integer("maxSurge", 1, low=0, high=1),
            progress_deadline_seconds=f.integer("progressDeadlineSeconds", 600),
        )
    )


def _queue(f: Fields) -> s.QueueSpec:
    return f.closed(s.QueueSpec(name=f.text("name", DNS_NAME)))


def _budget(f: Fields) -> s.BudgetSpec:
    """Of no kind it would be none."""
    money, per_hour = f.optional_text("money", MONEY), f.optional_text("moneyPerHour", DECIMAL)
    done_by = f.optional_text("doneBy", DATE_TIME)
    if not any(f.has(name) for name in ("money", "moneyPerHour", "doneBy")):
        f.problem("", "expected money, moneyPerHour or doneBy, got none of them")
    return f.closed(
        s.BudgetSpec(
            money=None if money is None else Decimal(money),
            money_per_hour=None if per_hour is None else Decimal(per_hour),
            done_by=None if done_by is None else datetime.fromisoformat(done_by),
        )
    )


def _failure_policy(f: Fields) -> s.FailurePolicy:
    limit = f.integer("backoffLimit", 6, low=0)
    return f.closed(s.FailurePolicy(backoff_limit=limit, rules=f.items("rules", _failure_rule, most=20)))


def _failure_rule(f: Fields) -> s.FailureRule:
    name, codes = f.text("name", DNS_LABEL), f.exit_codes("onExitCodes")
    action = f.choice("action", s.FailureAction.RESTART_WORKER, required=True)
    return f.closed(s.FailureRule(name=name, on_exit_codes=codes, action=action))
