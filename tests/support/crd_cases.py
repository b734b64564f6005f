"""Manifests on which the parser and the CRD must agree: rules between fields, edits, and random valid manifests."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import yaml
from hypothesis import strategies as st

from bamboo_core.job.spec import MOST_WORKERS
from bamboo_core.job.training_spec import TrainingSpec
from crd_kit import ABSENT, SCHEMA, text_pattern
from manifest_kit import WHOLE

Path = tuple[str | int, ...]
_WHOLE: dict[str, Any] = yaml.safe_load(WHOLE)
SPEC: Mapping[str, Any] = SCHEMA["properties"]["spec"]


def put(document: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return a copy of the document with the value at the path; the value ABSENT removes the field."""
    edited: Any = deepcopy(document)
    *parents, last = path
    inner = edited
    for name in parents:
        inner = inner.setdefault(name, {}) if isinstance(inner, dict) else inner[name]
    if value is ABSENT:
        inner.pop(last, None)
    else:
        inner[last] = deepcopy(value)
    return edited


def whole() -> dict[str, Any]:
    """Return a manifest with all fields except budget, keepBest, replicas, pipelines, epochs and tokens."""
    document = deepcopy(_WHOLE)
    document["spec"]["worker"]["resources"]["requests"] = {"cpu": "500m"}
    return document


def whole_of_a_fixed_grid() -> dict[str, Any]:
    document = whole()
    del document["spec"]["elastic"]
    document["spec"]["topology"]["pipelines"] = 2
    return document


def whole_with_url() -> dict[str, Any]:
    return put(whole(), ("spec", "checkpoint", "storage"), "s3://bucket/folder")


def running(document: Mapping[str, Any]) -> dict[str, Any]:
    return put(document, ("spec", "suspend"), False)


def suspended(document: Mapping[str, Any]) -> dict[str, Any]:
    return put(document, ("spec", "suspend"), True)


# Rules between fields


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    document = whole()
    for path, value in changes.items():
        document = put(document, ("spec", *path.split(".")), value)
    return document


CHOSEN: dict[str, Any] = {"topology": {}, "elastic": {"maxWorkers": 8}}  # the coordinator chooses the grid
FIXED: dict[str, Any] = {"topology.pipelines": 2, "elastic": ABSENT}
EPOCHS: dict[str, Any] = {"training.steps": ABSENT, "training.epochs": 2}
RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"budget": {"doneBy": "tomorrow"}, "elastic": ABSENT},
        "spec.budget.doneBy: expected a date and time of this century with its zone",
    ),
    ({"checkpoint.storage": "s3:bucket"}, "spec.checkpoint.storage: expected the URL of a store"),
    ({"checkpoint.storage": "pvc://a/b"}, "spec.checkpoint.storage: expected the URL of a store"),
    ({"worker.image": "a b"}, "spec.worker.image: expected a container image"),
    ({"task.initialFrom": {"url": "a b"}}, "spec.task.initialFrom.url: expected a path without spaces"),
    ({"training.epochs": 2}, "spec.training: expected exactly one of steps, epochs and tokens"),
    ({"training.steps": ABSENT}, "spec.training: expected exactly one of steps, epochs and tokens"),
    (EPOCHS | {"training.tokens": 3}, "spec.training: expected exactly one of steps, epochs and tokens"),
    (
        {"training.evaluation": ABSENT, "checkpoint.keepBest": True},
        "spec.checkpoint.keepBest: expected only with spec.training.evaluation",
    ),
    ({"training.microBatchSize": 7}, "spec.training.globalBatchSize: expected a multiple"),
    ({"training.microBatchSize": 2147483647}, "spec.training.globalBatchSize: expected a multiple"),
    (
        FIXED | {"training.globalBatchSize": 8, "training.gradientGroups": ABSENT},
        "spec.topology.pipelines: expected at most",
    ),
    (FIXED | {"topology.pipelines": 17}, "spec.topology.pipelines: expected at most spec.training.gradient"),
    ({"training.gradientGroups": 33}, "spec.training.gradientGroups: expected at most the number of microbatches"),
    (FIXED | {"training.gradientGroups": 1}, "spec.topology.pipelines: expected at most spec.training.gradientGroups"),
    (
        {"training.parameterPrecision": "bf16"},
        "spec.training.parameterPrecision: expected bf16 only with spec.training.pr",
    ),
    (
        {"training.boundaryPrecision": "bf16"},
        "spec.training.boundaryPrecision: expected bf16 only with spec.training.pr",
    ),
    ({"topology.split": [3, 4, 4]}, "spec.topology.split: expected a number of layers for each of the"),
    ({"topology.stages": 3}, "spec.topology.split: expected a number of layers for each of the"),
    (CHOSEN | {"topology.stages": "auto"}, "spec.topology.stages: "),
    (CHOSEN | {"topology.stages": 1.5}, "spec.topology.stages: "),
    (CHOSEN | {"elastic": ABSENT}, "spec.topology.stages: expected a number of stages, or spec.elastic"),
    ({"topology": ABSENT, "elastic": ABSENT}, "spec.topology.stages: expected a number of stages, or spec.elastic"),
    ({"topology.pipelines": 2}, "spec.topology.pipelines: expected only without spec.topology.stages or"),
    (CHOSEN | {"topology": {"split": [1, 1], "pipelines": 1}}, "spec.topology.pipelines: expected only without spec."),
    ({"elastic.minStages": 4}, "spec.elastic.minStages: expected only without a number of stages"),
    (CHOSEN | {"topology": {"split": [1, 1]}, "elastic.minStages": 2}, "spec.elastic.minStages: expected only without"),
    ({"elastic.minWorkers": 17}, "spec.elastic.minWorkers: expected at most spec.elastic.maxWorkers"),
    ({"elastic": {"maxWorkers": 3}}, "spec.elastic.maxWorkers: expected at least the workers of the smallest grid"),
    (
        CHOSEN | {"topology": {"split": [1, 1, 1]}, "elastic.maxWorkers": 2},
        "spec.elastic.maxWorkers: expected at least the workers of the smallest grid",
    ),
    (
        CHOSEN | {"topology": {"pipelines": 3}, "elastic.minStages": 3},
        "spec.elastic.maxWorkers: expected at least the workers of the smallest grid",
    ),
    (
        {"budget": {"money": "9"}, "nodePools": [{"name": "a", "pricePerHour": "1"}, {"name": "b"}]},
        "spec.budget: expected only doneBy without a pricePerHour in each of",
    ),
    ({"budget": {}, "nodePools": [{"name": "a", "pricePerHour": "1"}]}, "spec.budget: expected money or doneBy"),
    ({"budget": {"money": "9"}, "nodePools": ABSENT}, "spec.budget: expected only doneBy without a pricePerHour in"),
    ({"worker.devices": 4}, "spec.worker.devices: expected the number of GPUs in spec.worker.resources"),
    (
        {"worker.resources.limits": ABSENT, "worker.resources.requests": {"amd.com/gpu": "1"}},
        "spec.worker.devices: expected the number of GPUs in spec.worker.resources",
    ),
    ({"topology.split": [3, 1, 4, 2]}, "spec.worker.devices: expected at most the layers of each stage in spec.to"),
    ({"worker.resources.limits": {"a b": 1}}, "spec.worker.resources.limits: expected resource names"),
    ({"worker.resources.requests": {"a" * 254: 1}}, "spec.worker.resources.requests: expected resource names"),
    ({"worker.resources.limits": {"gpu": 1}}, "spec.worker.resources.limits: expected resource names"),
    ({"worker.resources.requests": {"Memory": "1Gi"}}, "spec.worker.resources.requests: expected resource names"),
]
KEPT: list[dict[str, Any]] = [
    EPOCHS,
    {"training.precision": ABSENT},
    {"training.precision": "bf16", "training.parameterPrecision": "bf16"},
    {"training.precision": "bf16", "training.boundaryPrecision": "bf16"},
    {"training.evaluation": ABSENT, "checkpoint.keepBest": False},
    {"topology.split": [2, 2, 2, 10_000]},
    {"topology.split": [1, 1, 1, 1], "worker.devices": 1},
    {"worker.devices": 1, "worker.resources.limits": {"nvidia.com/gpu": 8}},
    {"worker.devices": 16, "topology.split": ABSENT, "worker.resources.limits": {"nvidia.com/gpu": "16"}},
    {"worker.devices": 16, "topology.split": ABSENT, "worker.resources.limits": {"memory": "1Gi"}},
    {"worker.devices": 16, "topology.split": ABSENT, "worker.resources": ABSENT},
    {"topology.split": ABSENT},
    CHOSEN,
    {"topology": ABSENT, "elastic": {"maxWorkers": 1}},
    CHOSEN | {"topology": {"schedule": "ZBH1"}},
    CHOSEN | {"topology": {"pipelines": 2}, "elastic.minStages": 4},
    CHOSEN | {"topology": {"stages": 8}},
    CHOSEN | {"elastic": {"maxWorkers": 9, "minWorkers": 9, "minStages": 3, "objective": "Value"}},
    {"topology.stages": ABSENT},
    {"elastic": ABSENT},
    FIXED,
    {"training.deterministic": False},
    FIXED | {"topology.pipelines": 16},
    FIXED | {"topology.pipelines": 32, "training.gradientGroups": 32},
    {"training.gradientGroups": 4},
    {"budget": {"money": "12.5"}, "nodePools": [{"name": "a", "pricePerHour": "1"}]},
    {"budget": {"doneBy": "2028-02-29T23:59:59.5+05:30"}, "nodePools": ABSENT},
    {"budget": {"doneBy": "2001-01-01T00:00:00Z"}, "nodePools": [{"name": "a"}]},
]


# Edits of a job


NEW_JOB = "cannot change; create a new job instead"
SUSPENDED = "can change only while the job is suspended"
EDITS: list[
    tuple[str, Any, str]
] = [  # the field, its new value, and the refusal while the job runs, "" if there is none
    ("suspend", True, ""),
    ("backoffLimit", 2, ""),
    ("redundancy.mode", "None", ""),
    ("standby.workers", 2, ""),
    ("nodePools", [{"name": "a", "pricePerHour": "1"}], ""),
    ("worker.image", "b", ""),
    ("topology.schedule", "ZBH1", ""),
    ("ttlSecondsAfterFinished", 60, ""),
    ("progressDeadlineSeconds", 60, ""),
    ("task.config", {"a": 1}, f"spec.task: {NEW_JOB}"),
    ("training.seed", 1, f"spec.training: {NEW_JOB}"),
    ("topology.stages", 3, f"spec.topology.stages: {NEW_JOB}"),
    ("topology.split", [1, 1], f"spec.topology.split: {NEW_JOB}"),
    ("worker.devices", 2, f"spec.worker.devices: {SUSPENDED}"),
    ("spread.workersPerNode", 2, f"spec.spread: {NEW_JOB}"),
    ("checkpoint", {"storage": "s3://b"}, f"spec.checkpoint: {NEW_JOB}"),
    ("redundancy.placement", "Host", f"spec.redundancy: {SUSPENDED}, except mode and replicas"),
    ("queue", {"name": "q"}, f"spec.queue: {SUSPENDED}"),
]


# Any valid manifest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
RESOURCES = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "example.com/A_b.c"])


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for values that fit a field's schema, but may break rules between fields."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "x-kubernetes-preserve-unknown-fields" in schema:
        return st.dictionaries(st.text(max_size=5), JSON, max_size=3)
    kind = schema.get("type", "quantity")
    if kind == "object":
        return _objects(schema)
    if kind == "array":
        key = {"unique_by": lambda item: item["name"]} if schema["x-kubernetes-list-type"] == "map" else {}
        least = schema.get("minItems", 0)
        return st.lists(values(schema["items"]), min_size=least, max_size=least + 2, **key)  # type: ignore[arg-type]
    if kind == "number":
        return st.floats(1e-9, schema["maximum"]) | st.integers(1, schema["maximum"])
    if kind == "integer":
        return st.integers(schema["minimum"], schema.get("maximum", 2**63 - 1))
    if kind == "boolean":
        return st.booleans()
    texts = st.from_regex(re.compile(text_pattern(schema) or "", re.ASCII), fullmatch=True)
    fitting = texts.filter(lambda text: len(text) <= schema["maxLength"])
    numbers = st.integers(schema.get("minimum", 0), schema.get("maximum", 2**63 - 1))
    return fitting | numbers if kind == "quantity" else fitting


def _objects(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "additionalProperties" in schema:
        held = values(schema["additionalProperties"])
        plain = held.filter(lambda text: "*" not in text) if schema["additionalProperties"].get("type") else held
        return st.dictionaries(RESOURCES, plain, max_size=3)
    fields = {name: values(inner) for name, inner in schema["properties"].items()}
    needed = schema.get("required", ())
    optional = {name: strategy | st.none() for name, strategy in fields.items() if name not in needed}
    return st.fixed_dictionaries({name: fields[name] for name in needed}, optional=optional)


SPECS, NAMES = values(SPEC), values(SCHEMA["properties"]["metadata"]["properties"]["name"])
LENGTHS = {name: values(SPEC["properties"]["training"]["properties"][name]) for name in ("steps", "epochs", "tokens")}


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid manifest without budget: values that fit the schema, changed to fit the rules between fields."""
    spec = draw(SPECS)
    spec.pop("budget", None)  # it needs the price of each pool
    training, topology = spec["training"], spec.get("topology") or {}
    microbatches = draw(st.integers(1, 1024))
    training["microBatchSize"] = draw(st.integers(1, (2**31 - 1) // microbatches))
    training["globalBatchSize"] = training["microBatchSize"] * microbatches
    length = draw(st.sampled_from(sorted(LENGTHS)))
    training |= {name: draw(LENGTHS[name]) if name == length else None for name in LENGTHS}
    if training.get("precision") != "bf16":
        training.pop("parameterPrecision", None)
        training.pop("boundaryPrecision", None)
    if training.get("gradientGroups") is not None:
        training["gradientGroups"] = draw(st.integers(1, microbatches))
    usual = TrainingSpec(steps=1, global_batch_size=microbatches, micro_batch_size=1).groups
    _fit_grid(draw, spec, topology, training.get("gradientGroups") or usual)
    _fit_devices(spec.get("worker") or {}, topology)
    if spec.get("checkpoint") is not None and training.get("evaluation") is None:
        spec["checkpoint"].pop("keepBest", None)
    metadata = {"name": draw(NAMES)}
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": metadata, "spec": spec}


def _fit_grid(draw: st.DrawFn, spec: dict[str, Any], topology: dict[str, Any], most: int) -> None:
    """Change `topology` and `elastic` in place to fit the rules between fields. most: maximum number of pipelines."""
    if topology.get("split") is not None:
        topology["stages"] = draw(st.sampled_from([len(topology["split"]), None]))
    stages = len(topology.get("split") or ()) or topology.get("stages")
    elastic = spec.get("elastic")
    if stages is None and elastic is None:
        spec["topology"], topology["stages"] = topology, draw(st.integers(1, 9))
    if elastic is not None and stages is not None:
        topology.pop("pipelines", None)
        elastic.pop("minStages", None)
    if topology.get("pipelines") is not None:
        topology["pipelines"] = draw(st.integers(1, min(most, 99)))
    if elastic is not None:
        if elastic.get("minStages") is not None:
            elastic["minStages"] = draw(st.integers(1, 9))
        least = (stages or elastic.get("minStages") or 1) * (topology.get("pipelines") or 1)
        elastic["maxWorkers"] = draw(st.integers(least, MOST_WORKERS))
        if elastic.get("minWorkers") is not None:
            elastic["minWorkers"] = draw(st.integers(1, elastic["maxWorkers"]))


def _fit_devices(worker: dict[str, Any], topology: dict[str, Any]) -> None:
    """Limit `devices`, unless 1 or unset, to the layers of a split's smallest stage; set `nvidia.com/gpu` to it."""
    if worker.get("devices") in (None, 1):
        return
    fewest = min(topology.get("split") or (worker["devices"],))
    worker["devices"] = min(worker["devices"], fewest)
    resources = worker.get("resources") or {}
    for asked in (resources.get("limits") or {}, resources.get("requests") or {}):
        if "nvidia.com/gpu" in asked:
            asked["nvidia.com/gpu"] = worker["devices"]
