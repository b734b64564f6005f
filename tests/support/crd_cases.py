"""Manifests to compare parser and CRD on: any valid one, and every way to change one field of one."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from hypothesis import strategies as st

from bamboo_core.job.spec import MOST_WORKERS
from bamboo_core.job.training_spec import TrainingSpec
from crd_kit import ABSENT, SCHEMA, defaulted, refusals
from manifest_kit import WHOLE

Path = tuple[str | int, ...]
_WHOLE: dict[str, Any] = yaml.safe_load(WHOLE)
SPEC: Mapping[str, Any] = SCHEMA["properties"]["spec"]
VALUES_OF_EACH_TYPE: dict[str, Any] = {
    "integer": 7,
    "number": 1.5,
    "string": "x",
    "boolean": True,
    "array": [],
    "object": {},
}


@dataclass(frozen=True, slots=True)
class Edit:
    """One value to put at a path."""

    path: Path
    value: Any
    why: str
    refused: bool = True  # whether it is wrong whatever the other fields are

    def of(self, document: Mapping[str, Any]) -> dict[str, Any]:
        edited: Any = deepcopy(document)
        *parents, last = self.path
        inner = edited
        for name in parents:
            inner = inner[name]
        if self.value is ABSENT:
            del inner[last]
        else:
            inner[last] = deepcopy(self.value)
        return edited

    @property
    def small(self) -> bool:
        return not isinstance(self.value, dict | list | str) or len(self.value) <= 1024

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.why}"


def whole() -> dict[str, Any]:
    """Every field but one of the two storages, and a number of pipelines, which are chosen."""
    document = deepcopy(_WHOLE)
    document["spec"]["worker"]["resources"]["requests"] = {"cpu": "500m"}
    return document


def wholes(field: str) -> list[dict[str, Any]]:
    """Those in which that field of the spec differs."""
    if field == "budget":
        return [whole_with_budget()]
    if field == "topology":
        return [whole(), whole_of_a_fixed_grid()]
    return [whole(), whole_with_uri()] if field == "checkpoint" else [whole()]


def whole_of_a_fixed_grid() -> dict[str, Any]:
    document = whole()
    del document["spec"]["elastic"]
    document["spec"]["topology"]["pipelines"] = 2
    return document


def whole_with_budget() -> dict[str, Any]:
    """A manifest with budgets of all kinds, for which the grid has to be chosen."""
    document = whole()
    return {
        **document,
        "spec": {
            **document["spec"],
            "elastic": {"objective": "Value", "maxWorkers": 8},
            "budget": {"money": "100", "doneBy": "2026-12-24T18:00:00Z"},
        },
    }


def whole_with_uri() -> dict[str, Any]:
    return Edit(("spec", "checkpoint", "storage"), {"uri": "s3://bucket/folder"}, "").of(whole())


def running(document: Mapping[str, Any]) -> dict[str, Any]:
    return Edit(("spec", "suspend"), False, "").of(document)


def suspended(document: Mapping[str, Any]) -> dict[str, Any]:
    return Edit(("spec", "suspend"), True, "").of(document)


@cache
def good_changes(field: str) -> list[tuple[dict[str, Any], Edit, dict[str, Any]]]:
    """An old manifest, a change of the field, and the new manifest: good by itself, and not the same to a server."""
    found = []
    for old in map(running, wholes(field)):
        for edit in edits(SPEC["properties"][field], old["spec"][field], ("spec", field)):
            if edit.small and not edit.refused:
                new = edit.of(old)
                if not refusals(new) and defaulted(new) != defaulted(old):
                    found.append((old, edit, new))
    return found


def edits(schema: Mapping[str, Any], value: Any, path: Path) -> Iterator[Edit]:
    """Every edit of this value and of what is in it."""
    kind = schema.get("type", "string")  # a quantity may be an integer as well
    also = "integer" if "x-kubernetes-int-or-string" in schema else "integer" if kind == "number" else kind
    for other, wrong in VALUES_OF_EACH_TYPE.items():
        if other not in (kind, also):
            yield Edit(path, wrong, f"{other} instead of {kind}")
    if isinstance(value, bool):
        yield Edit(path, not value, f"{not value}", False)
    if isinstance(value, dict):
        yield from _object_edits(schema, value, path)
    elif isinstance(value, list):
        yield from _list_edits(schema, value, path)
    elif isinstance(value, str):
        yield from _text_edits(schema, value, path)
    if kind in ("integer", "number") or also == "integer":
        yield from _number_edits(schema, path)
    if "enum" in schema:
        yield from (Edit(path, member, f"the choice {member}", False) for member in schema["enum"])


def _object_edits(schema: Mapping[str, Any], value: dict[str, Any], path: Path) -> Iterator[Edit]:
    fields, values = schema.get("properties", {}), schema.get("additionalProperties")
    for name, inner in value.items():
        if name in fields or values:
            yield from edits(fields.get(name, values), inner, (*path, name))
    for name in fields.keys() & value.keys():
        yield Edit((*path, name), ABSENT, "absent", name in schema.get("required", ()))
        yield Edit((*path, name), None, "null", name in schema.get("required", ()))
    if fields:
        yield Edit((*path, "unknown"), 1, "unknown field")
        yield from (Edit((*path, name.lower()), 1, "wrong case") for name in fields if name.lower() not in fields)
    if "maxProperties" in schema:
        most = schema["maxProperties"]
        text = (values or {}).get("type") == "string"
        yield Edit(path, _named_values(most, text), f"{most} values", False)
        yield Edit(path, _named_values(most + 1, text), f"{most + 1} values")
    if values and values.get("type") == "string":
        for name in ("", "a b", "-a", "a*b*", "a\n", "é", "a" * 254):
            yield Edit((*path, name), "x", "no name of a tensor")
        yield Edit((*path, "a"), "x*", "a star in one name only")
        for name in ("a", "A_b.c", "(a)", "a" * 253):
            yield Edit((*path, name), "x", "a name of a tensor", False)
    elif values:
        for name in ("", "a b", "-a", "/a", "a/", "a/b/c", "a\n", "é", "a" * 254):
            yield Edit((*path, name), 1, "no resource name")
        for name in ("a", "A_b.c", "example.com/a", "a" * 253):
            yield Edit((*path, name), 1, "a resource name", False)


@cache
def _named_values(count: int, text: bool) -> dict[str, int | str]:
    return {f"n{i}": f"m{i}" if text else i for i in range(count)}


def _list_edits(schema: Mapping[str, Any], value: list[Any], path: Path) -> Iterator[Edit]:
    if not value:
        return
    for i, item in enumerate(value):
        yield from edits(schema["items"], item, (*path, i))
        yield Edit((*path, i), None, "null in a list")
    named, most, least = isinstance(value[0], dict), schema["maxItems"], schema.get("minItems", 0)
    many = [value[0] | {"name": f"n{i}"} if named else value[0] for i in range(most + 1)]
    yield Edit(path, many[:most], f"{most} items", False)
    yield Edit(path, many, f"{most + 1} items")
    yield Edit(path, [], "no items", least > 0)
    if named:
        yield Edit(path, [value[0], many[1], value[0]], "one name twice")


def _text_edits(schema: Mapping[str, Any], value: str, path: Path) -> Iterator[Edit]:
    if "enum" in schema:
        yield from (Edit(path, text, "no choice") for text in ("", value.lower() + "x", value.swapcase(), f"{value} "))
        return
    longest = value.rjust(schema["maxLength"], "a")
    yield Edit(path, longest, f"{len(longest)} characters", re.fullmatch(schema["pattern"], longest) is None)
    yield Edit(path, f"a{longest}", "a character too many")
    for text in ("", f"{value}\n", f" {value}", f"{value}\v", f"{value} x", f"-{value}"):
        yield Edit(path, text, "a text that does not fit")
    numbers = [head + "1" * digits for head in ("", "1.") for digits in (9, 10, 18, 19)]
    for text in (f"é{value}", f"{value}_", f"{value}.", ".5", "5.", "1K", "1mi", "1e-12", "1E+123", *numbers):
        yield Edit(path, text, "a text that may not fit", False)


def _number_edits(schema: Mapping[str, Any], path: Path) -> Iterator[Edit]:
    low, high = schema["minimum"], schema.get("maximum", 2**63 - 1)
    above = high + 1 if schema.get("type") != "number" else high * (1 + 1e-15)
    yield Edit(path, low, f"the least, {low}", "exclusiveMinimum" in schema)
    yield Edit(path, low - 1, f"less than the least, {low}")
    yield Edit(path, high, f"the most, {high}", False)
    yield Edit(path, above, f"more than the most, {high}")
    yield Edit(path, "7", "a number in quotes", "x-kubernetes-int-or-string" not in schema)


# Rules between fields


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    document = whole()
    for path, value in changes.items():
        document = Edit(("spec", *path.split(".")), value, "").of(document)
    return document


CHOSEN: dict[str, Any] = {"topology": {}, "elastic": {"maxWorkers": 8}}  # what says least
FIXED: dict[str, Any] = {"topology.pipelines": 2, "elastic": ABSENT}
UNTIL: dict[str, Any] = {"training.steps": ABSENT, "training.until": {"epochs": 2}}
RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"task.initialFrom.rename": {"a b": "x"}},
        'spec.task.initialFrom.rename: expected the name of a tensor with at most one "*"',
    ),
    (
        {"task.initialFrom.rename": {"h.*": "x"}},
        'spec.task.initialFrom.rename: expected a "*" in both names or in none',
    ),
    ({"task.initialFrom": {"step": 3}}, "spec.task.initialFrom: expected url or job"),
    ({"task.initialFrom": {"url": "/a", "best": True}}, "spec.task.initialFrom.best: expected only with job"),
    ({"training.until": {"epochs": 2}}, "spec.training: expected exactly one of steps and until"),
    (UNTIL | {"training.until": {"epochs": 2, "steps": 3}}, "spec.training.until: expected exactly one of steps"),
    (
        {"training.loggers": [{"name": "a", "type": "Custom"}]},
        "spec.training.loggers.0.entrypoint: expected with type Custom",
    ),
    (
        {"training.loggers": [{"name": "a", "type": "MLflow", "entrypoint": "a:b"}]},
        "spec.training.loggers.0.entrypoint: expected with type Custom, and",
    ),
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
    (
        FIXED | {"topology.pipelines": 33, "training.reproducible": False, "training.gradientGroups": ABSENT},
        "spec.topology.pipelines: expected at most",
    ),
    ({"training.gradientGroups": 33}, "spec.training.gradientGroups: expected at most the number of microbatches"),
    (
        {"training.gradientGroups": 8, "training.reproducible": False},
        "spec.training.gradientGroups: expected only with spec.training.reproducible true",
    ),
    (FIXED | {"training.gradientGroups": 1}, "spec.topology.pipelines: expected at most spec.training.gradientGroups"),
    (
        {"training.parameterPrecision": "bf16"},
        "spec.training.parameterPrecision: expected bf16 only with spec.training.pr",
    ),
    (
        {"training.boundaryPrecision": "bf16"},
        "spec.training.boundaryPrecision: expected bf16 only with spec.training.pr",
    ),
    ({"training.precision": "bf16"}, "spec.training.lossScale: expected only with spec.training.precision fp16"),
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
    ({"checkpoint.storage": {}}, "spec.checkpoint.storage: expected exactly one of"),
    ({"checkpoint.storage.uri": "s3://x"}, "spec.checkpoint.storage: expected exactly one of"),
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
    UNTIL,
    {"training.precision": ABSENT, "training.lossScale": ABSENT},
    {"training.lossScale": {}},
    {"training.precision": "bf16", "training.parameterPrecision": "bf16", "training.lossScale": ABSENT},
    {"training.precision": "bf16", "training.boundaryPrecision": "bf16", "training.lossScale": ABSENT},
    {"training.gradientPrecision": "bf16"},
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
    FIXED | {"topology.pipelines": 32, "training.reproducible": False, "training.gradientGroups": ABSENT},
    {"training.gradientGroups": 4},
    {"budget": {"money": "12.5"}, "nodePools": [{"name": "a", "pricePerHour": "1"}]},
    {"budget": {"doneBy": "2028-02-29T23:59:59.5+05:30"}, "nodePools": ABSENT},
    {"budget": {"doneBy": "2001-01-01T00:00:00Z"}, "nodePools": [{"name": "a"}]},
]


# Any valid manifest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
RESOURCES = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "example.com/A_b.c"])


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """What fits the schema of one field; rules between fields are not looked at."""
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
        if schema.get("exclusiveMaximum"):
            return st.floats(1e-9, schema["maximum"], exclude_max=True)
        return st.floats(1e-9, schema["maximum"]) | st.integers(1, schema["maximum"])
    if kind == "integer":
        return st.integers(schema["minimum"], schema.get("maximum", 2**63 - 1))
    if kind == "boolean":
        return st.booleans()
    texts = st.from_regex(re.compile(schema["pattern"][1:-1], re.ASCII), fullmatch=True)
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
STORAGES = {
    name: values(storage)
    for name, storage in SPEC["properties"]["checkpoint"]["properties"]["storage"]["properties"].items()
}

UNITS = {
    name: values(unit) for name, unit in SPEC["properties"]["training"]["properties"]["until"]["properties"].items()
}


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid one: fields that fit, made to keep the rules between them."""
    spec = draw(SPECS)
    spec.pop("budget", None)  # it needs the price of each pool
    training, topology = spec["training"], spec.get("topology") or {}
    microbatches = draw(st.integers(1, 1024))
    training["microBatchSize"] = draw(st.integers(1, (2**31 - 1) // microbatches))
    training["globalBatchSize"] = training["microBatchSize"] * microbatches
    if draw(st.booleans()):
        unit = draw(st.sampled_from(sorted(UNITS)))
        training.pop("steps", None)
        training["until"] = {unit: draw(UNITS[unit])}
    else:
        training.pop("until", None)
        training["steps"] = draw(st.integers(1, 2**31 - 1))
    if (initial := spec["task"].get("initialFrom")) is not None and initial.get("url") is None:
        initial["job"] = draw(st.sampled_from(["before", "a-1"]))
    elif initial is not None and initial.get("job") is None:
        initial.pop("best", None)
    for one in training.get("loggers") or ():
        one.pop("entrypoint", None)
        if one["type"] == "Custom":
            one["entrypoint"] = "a.b:log"
    if training.get("precision") != "fp16":
        training.pop("lossScale", None)
    if training.get("precision") != "bf16":
        training.pop("parameterPrecision", None)
        training.pop("boundaryPrecision", None)
    if training.get("reproducible") is False:
        training["gradientGroups"] = None
    if training.get("gradientGroups") is not None:
        training["gradientGroups"] = draw(st.integers(1, microbatches))
    most = (
        training.get("gradientGroups")
        or TrainingSpec(
            steps=1,
            global_batch_size=microbatches,
            micro_batch_size=1,
            reproducible=training.get("reproducible") is not False,
        ).most_pipelines
    )
    _fit_grid(draw, spec, topology, most)
    _fit_devices(spec.get("worker") or {}, topology)
    if spec.get("checkpoint") is not None:
        kind = draw(st.sampled_from(sorted(STORAGES)))
        spec["checkpoint"]["storage"] = {kind: draw(STORAGES[kind])}
        if training.get("evaluation") is None:
            spec["checkpoint"].pop("keepBest", None)
    metadata = {"name": draw(NAMES)}
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": metadata, "spec": spec}


def _fit_grid(draw: st.DrawFn, spec: dict[str, Any], topology: dict[str, Any], most: int) -> None:
    """Makes what is fixed of the grid and what is chosen keep the rules. most: pipelines."""
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
    """Makes them keep the rules of a worker's devices."""
    if worker.get("devices") in (None, 1):
        return
    fewest = min(topology.get("split") or (worker["devices"],))
    worker["devices"] = min(worker["devices"], fewest)
    resources = worker.get("resources") or {}
    for asked in (resources.get("limits") or {}, resources.get("requests") or {}):
        if "nvidia.com/gpu" in asked:
            asked["nvidia.com/gpu"] = worker["devices"]
