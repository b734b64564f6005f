"""The one parser of BambooJob manifests: raw document -> `JobSpec`, or every problem in it at once.

Unknown fields are errors; null means absent, as in Kubernetes. `status` and the server's metadata pass.
"""

import json
import math
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from bamboo import spec as s
from bamboo.names import API_VERSION, KIND

MAX_BYTES = 1 << 20
MAX_INT = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_TREE_VALUES, MAX_TREE_DEPTH, MAX_TREE_TEXT = 10_000, 16, 65_536
MAX_SUGGESTIONS = 20  # per object; a hostile document must not buy a quadratic search

E = TypeVar("E", bound=StrEnum)
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ManifestError(ValueError):
    """A manifest that cannot be used; its text has one line per problem."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def load_manifest(path: str | Path) -> s.JobSpec:
    """Reads one YAML or JSON file. Raises ManifestError for whatever is wrong with it."""
    return parse_manifest(_load(str(path)))


def parse_manifest(document: Mapping[str, Any]) -> s.JobSpec:
    """Raises ManifestError with all problems of the document."""
    problems: list[Problem] = []
    root = _Fields(document, "", problems)
    root.text("apiVersion", s.exactly(API_VERSION))
    root.text("kind", s.exactly(KIND))
    root.known.append("status")
    metadata = root.child("metadata")
    metadata.known.extend(METADATA)
    name = metadata.text("name", s.DNS_LABEL)
    namespace = metadata.optional_text("namespace", s.DNS_LABEL) or "default"
    metadata.close()
    job = _job(root.child("spec"), name, namespace)
    root.close()
    _check(job, problems)
    if problems:
        raise ManifestError(*problems)
    return job


# The tables: one function per object of the API


def _job(f: "_Fields", name: str, namespace: str) -> s.JobSpec:
    topology = _topology(f.child("topology"))
    job = s.JobSpec(
        name=name,
        namespace=namespace,
        suspend=f.flag("suspend"),
        managed_by=f.optional_text("managedBy", s.MANAGER) or s.DEFAULT_MANAGER,
        task=_task(f.child("task")),
        training=_training(f.child("training")),
        topology=topology,
        elastic=_elastic(f.child("elastic"), topology.pipelines),
        redundancy=_redundancy(f.child("redundancy")),
        standby=_standby(f.child("standby")),
        node_pools=f.items("nodePools", _node_pool, most=16),
        spread=_spread(f.child("spread")),
        checkpoint=_checkpoint(f.child("checkpoint")) if f.has("checkpoint") else None,
        worker=_worker(f.child("worker")),
        queue=_queue(f.child("queue")) if f.has("queue") else None,
        failure_policy=_failure_policy(f.child("failurePolicy")),
        active_deadline_seconds=f.optional_integer("activeDeadlineSeconds"),
        progress_deadline_seconds=f.integer("progressDeadlineSeconds", 1800),
        ttl_seconds_after_finished=f.optional_integer("ttlSecondsAfterFinished", low=0),
        clean_pod_policy=f.choice("cleanPodPolicy", s.CleanPodPolicy.RUNNING),
    )
    f.close()
    return job


def _task(f: "_Fields") -> s.TaskSpec:
    return f.closed(s.TaskSpec(entrypoint=f.text("entrypoint", s.ENTRYPOINT), config=f.tree("config")))


def _training(f: "_Fields") -> s.TrainingSpec:
    return f.closed(
        s.TrainingSpec(
            steps=f.integer("steps"),
            global_batch_size=f.integer("globalBatchSize"),
            micro_batch_size=f.integer("microBatchSize"),
            seed=f.integer("seed", 0, low=0, high=MAX_INT64),
            precision=f.choice("precision", s.Precision.FP32),
            max_gradient_norm=f.optional_positive("maxGradientNorm"),
        )
    )


def _topology(f: "_Fields") -> s.TopologySpec:
    if f.get("stages") == "auto":
        f.problem("stages", '"auto" is not supported yet, give the number of stages as an integer >= 1')
        f.values = {**f.values, "stages": 1}
    return f.closed(
        s.TopologySpec(stages=f.integer("stages", high=1024), pipelines=f.integer("pipelines", 1, high=1024))
    )


def _elastic(f: "_Fields", pipelines: int) -> s.ElasticSpec:
    return f.closed(
        s.ElasticSpec(
            min_pipelines=f.integer("minPipelines", pipelines, high=1024),
            max_pipelines=f.integer("maxPipelines", pipelines, high=1024),
            stabilization_seconds=f.integer("stabilizationSeconds", 120, low=0),
        )
    )


def _redundancy(f: "_Fields") -> s.RedundancySpec:
    mode = f.choice("mode", s.RedundancyMode.EAGER_FORWARD)
    return f.closed(s.RedundancySpec(mode=mode, placement=f.choice("placement", s.Placement.DEVICE)))


def _standby(f: "_Fields") -> s.StandbySpec:
    return f.closed(s.StandbySpec(workers=f.integer("workers", 0, low=0, high=1024)))


def _node_pool(f: "_Fields") -> s.NodePool:
    price = f.optional_text("pricePerHour", s.DECIMAL)
    return f.closed(
        s.NodePool(
            name=f.text("name", s.DNS_LABEL),
            capacity=f.choice("capacity", s.Capacity.SPOT),
            preset=f.choice("preset", s.Preset.NONE),
            price_per_hour=None if price is None else Decimal(price),
            after_seconds=f.integer("afterSeconds", 0, low=0),
            max_workers=f.optional_integer("maxWorkers"),
            revert=f.flag("revert"),
        )
    )


def _spread(f: "_Fields") -> s.SpreadSpec:
    key = f.optional_text("topologyKey", s.LABEL_KEY) or "topology.kubernetes.io/zone"
    return f.closed(s.SpreadSpec(topology_key=key, policy=f.choice("policy", s.SpreadPolicy.INTERLEAVE)))


def _checkpoint(f: "_Fields") -> s.CheckpointSpec:
    return f.closed(
        s.CheckpointSpec(
            storage=_storage(f.child("storage")),
            every_steps=f.integer("everySteps", 200),
            keep_latest=f.integer("keepLatest", 3, high=10_000),
            resume=f.choice("resume", s.Resume.LATEST),
        )
    )


def _storage(f: "_Fields") -> s.StorageSpec:
    kinds = ("uri", "persistentVolumeClaim")
    given = [kind for kind in kinds if f.has(kind)]
    if len(given) != 1:
        f.problem("", f"expected exactly one of uri and persistentVolumeClaim, got {'both' if given else 'neither'}")
    claim = None
    if f.has("persistentVolumeClaim"):
        volume = f.child("persistentVolumeClaim")
        claim = volume.closed(volume.text("claimName", s.DNS_NAME))
    f.known.extend(kinds)
    return f.closed(s.StorageSpec(uri=f.optional_text("uri", s.URI), claim_name=claim))


def _worker(f: "_Fields") -> s.WorkerSpec:
    resources = f.child("resources")
    limits, requests = resources.quantities("limits"), resources.quantities("requests")
    resources.close()
    image, template = f.optional_text("image", s.IMAGE), f.tree("template")
    spec = s.ResourcesSpec(limits=limits, requests=requests)
    return f.closed(s.WorkerSpec(image=image, resources=spec, template=template))


def _queue(f: "_Fields") -> s.QueueSpec:
    return f.closed(s.QueueSpec(name=f.text("name", s.DNS_NAME)))


def _failure_policy(f: "_Fields") -> s.FailurePolicy:
    limit = f.integer("backoffLimit", 6, low=0)
    return f.closed(s.FailurePolicy(backoff_limit=limit, rules=f.items("rules", _failure_rule, most=20)))


def _failure_rule(f: "_Fields") -> s.FailureRule:
    name, codes = f.text("name", s.DNS_LABEL), f.exit_codes("onExitCodes")
    action = f.choice("action", s.FailureAction.RESTART_WORKER, required=True)
    return f.closed(s.FailureRule(name=name, on_exit_codes=codes, action=action))


def _check(job: s.JobSpec, problems: list[Problem]) -> None:
    """The rules between fields; one is skipped where a field it reads is already wrong."""
    wrong = [problem.path for problem in problems]
    t, pipelines, elastic = job.training, job.topology.pipelines, job.elastic
    batch, micro = "spec.training.globalBatchSize", "spec.training.microBatchSize"
    count, least, most = "spec.topology.pipelines", "spec.elastic.minPipelines", "spec.elastic.maxPipelines"

    def rule(holds: bool, path: str, message: str, *others: str) -> None:
        read = (path, *others)
        if not holds and not any(p == bad or p.startswith(f"{bad}.") for p in read for bad in wrong):
            problems.append(Problem(path, message))

    whole = t.global_batch_size % t.micro_batch_size == 0
    rule(
        whole,
        batch,
        f"expected a multiple of {micro} ({t.micro_batch_size}), got {t.global_batch_size}",
        micro,
    )
    enough = f"the number of microbatches in a step ({t.microbatches})"
    rule(
        not whole or pipelines <= t.microbatches,
        count,
        f"expected at most {enough}, got {pipelines}",
        batch,
        micro,
    )
    low, high = elastic.min_pipelines, elastic.max_pipelines
    rule(low <= pipelines, least, f"expected at most {count} ({pipelines}), got {low}", count)
    rule(high >= pipelines, most, f"expected at least {count} ({pipelines}), got {high}", count)
    fits = not whole or high <= t.microbatches or high == pipelines
    rule(fits, most, f"expected at most {enough}, got {high}", batch, micro)
    for path, names in (
        ("spec.nodePools", [pool.name for pool in job.node_pools]),
        ("spec.failurePolicy.rules", [r.name for r in job.failure_policy.rules]),
    ):
        for i, name in enumerate(names):
            first = names.index(name)
            used = f"{path}[{first}].name"
            rule(first == i, f"{path}[{i}].name", f"{_show(name)} is already used by {used}", used)


# The reader


def _show(value: object) -> str:
    """A value in a sentence: JSON, on one line, shortened."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= 60 else json.dumps(value[:57] + "...")
    return json.dumps(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def _join(path: str, name: str) -> str:
    if not re.fullmatch(r"[-\w./]{1,80}(\[\d+\])?", name, re.ASCII):
        return f"{path}[{_show(name)}]"
    return f"{path}.{name}" if path else name


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True)
class _Fields:
    """Reads one object. A wrong field is noted once and reading goes on with a harmless value."""

    values: Mapping[Any, Any]
    path: str
    problems: list[Problem]
    known: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            self.problem("", f"expected an object, got {_show(self.values)}")
            self.values, self.problems = {}, []  # what is missing inside is not worth a word

    def at(self, name: str) -> str:
        if not name:
            return self.path or "manifest"
        return _join(self.path, name)

    def problem(self, name: str, message: str) -> None:
        self.problems.append(Problem(self.at(name), message))

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def has(self, name: str) -> bool:
        self.known.append(name)
        return self.get(name) is not None

    def close(self) -> None:
        """Notes what nobody asked for."""
        suggestions = MAX_SUGGESTIONS
        for key in self.values:
            if not isinstance(key, str):
                self.problem("", f"expected field names to be strings, got {_show(key)}")
            elif key not in self.known:
                suggestions -= 1
                near = get_close_matches(key, self.known, n=1) if suggestions >= 0 and len(key) <= 80 else []
                self.problem(key, f"unknown field{f', did you mean {near[0]}?' if near else ''}")

    def closed(self, value: T) -> T:
        self.close()
        return value

    def _read(self, name: str, said: str, fits: Callable[[Any], bool], *, required: bool = False) -> Any:
        value = self.get(name) if self.has(name) else None
        if value is None and required:
            self.problem(name, f"required, expected {said}")
        elif value is not None and not fits(value):
            self.problem(name, f"expected {said}, got {_show(value)}")
            return None
        return value

    def _integer(self, name: str, low: int, high: int, required: bool) -> int | None:
        value = self.get(name)
        said = f"an integer <= {high}" if _is_int(value) and value > high else f"an integer >= {low}"
        read: int | None = self._read(name, said, lambda v: _is_int(v) and low <= v <= high, required=required)
        return read

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT) -> int:
        """Without a default the field is required."""
        value = self._integer(name, low, high, default is None)
        return value if value is not None else low if default is None else default

    def optional_integer(self, name: str, *, low: int = 1) -> int | None:
        return self._integer(name, low, MAX_INT, False)

    def optional_positive(self, name: str) -> float | None:
        def fits(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e9

        value = self._read(name, "a number > 0 and <= 1e9", fits)
        return None if value is None else float(value)

    def flag(self, name: str) -> bool:
        return bool(self._read(name, "true or false", lambda v: isinstance(v, bool)))

    def optional_text(self, name: str, form: s.Form, *, required: bool = False) -> str | None:
        def fits(value: object) -> bool:
            return isinstance(value, str) and form.fits(value)

        read: str | None = self._read(name, form.said, fits, required=required)
        return read

    def text(self, name: str, form: s.Form) -> str:
        return self.optional_text(name, form, required=True) or ""

    def choice(self, name: str, default: E, *, required: bool = False) -> E:
        members = {str(member): member for member in type(default)}
        said = f"one of {', '.join(members)}"
        value = self._read(name, said, lambda v: isinstance(v, str) and v in members, required=required)
        return default if value is None else members[value]

    def child(self, name: str) -> "_Fields":
        """An absent object reads as an empty one."""
        return _Fields(self.get(name) if self.has(name) else {}, self.at(name), self.problems)

    def items(self, name: str, build: Callable[["_Fields"], T], *, most: int) -> tuple[T, ...]:
        fits = self._read(name, f"a list of at most {most} objects", _list_fits(0, most)) or ()
        return tuple(build(_Fields(v, f"{self.at(name)}[{i}]", self.problems)) for i, v in enumerate(fits))

    def exit_codes(self, name: str) -> tuple[int, ...]:
        codes = self._read(name, "a list of 1 to 64 exit codes", _list_fits(1, 64), required=True) or ()
        for i, code in enumerate(codes):
            if not _is_int(code) or not 1 <= code <= 255:
                self.problem(f"{name}[{i}]", f"expected an integer from 1 to 255, got {_show(code)}")
        return tuple(codes)

    def quantities(self, name: str) -> dict[str, str | int]:
        """Kubernetes quantities by resource name."""
        child = self.child(name)
        if len(child.values) > 32:
            self.problem(name, "expected at most 32 resources")
            return {}
        read: dict[str, str | int] = {}
        for key in filter(lambda k: isinstance(k, str), child.values):
            number = _is_int(child.get(key)) and 0 <= child.get(key) <= MAX_INT64
            if not s.LABEL_KEY.fits(key):
                self.problem(name, f"expected resource names such as nvidia.com/gpu, got {_show(key)}")
                child.known.append(key)
            elif number:
                read[key] = child.get(key)
            elif text := child.text(key, s.QUANTITY):
                read[key] = text
            child.known.append(key)
        child.close()
        return read

    def tree(self, name: str) -> dict[str, Any]:
        """A free object of JSON values, copied; bounded, because YAML aliases can make a small file vast."""
        child = self.child(name)
        return _Tree(child.problems).copy_object(child.values, child.path, 1)


def _list_fits(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and least <= len(value) <= most


@dataclass(slots=True)
class _Tree:
    problems: list[Problem]
    left: int = MAX_TREE_VALUES

    def copy_object(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        copied = {}
        for key, inner in value.items():
            if self.left < 0:
                break
            if not isinstance(key, str) or len(key) > 253:
                self._refuse(path, f"expected field names to be strings of at most 253 characters, got {_show(key)}")
            else:
                copied[key] = self.copy(inner, _join(path, key), depth)
        return copied

    def copy(self, value: Any, path: str, depth: int) -> Any:
        self.left -= 1
        if self.left < 0:
            return (
                self._refuse(path, f"too large, expected at most {MAX_TREE_VALUES} values") if self.left == -1 else None
            )
        if isinstance(value, Mapping | list | tuple) and depth >= MAX_TREE_DEPTH:
            return self._refuse(path, f"nested too deeply, expected at most {MAX_TREE_DEPTH} levels")
        if isinstance(value, Mapping):
            return self.copy_object(value, path, depth + 1)
        if isinstance(value, list | tuple):
            return [self.copy(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value) if self.left >= 0]
        if isinstance(value, str) and len(value) > MAX_TREE_TEXT:
            return self._refuse(path, f"expected at most {MAX_TREE_TEXT} characters, got {len(value)}")
        if _is_int(value) and not -MAX_INT64 <= value <= MAX_INT64:
            return self._refuse(path, f"expected an integer of 64 bits, got {_show(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            return self._refuse(path, f"expected a finite number, got {value}")
        if value is not None and not isinstance(value, str | int | float):
            return self._refuse(path, f"expected a JSON value, got {_show(value)}")
        return value

    def _refuse(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))


# The file


class _Loader(yaml.SafeLoader):
    """Safe YAML as Kubernetes reads it: no duplicate keys, dates stay text, 1e-3 is a number.

    Merge keys are refused: a few of them, nested, double in size at every level.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are refused", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a string", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {_show(key)}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def _load(path: str) -> Any:
    def wrong(message: str) -> ManifestError:
        return ManifestError(Problem(path, message))

    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise wrong("no such file") from None
    except (OSError, ValueError) as error:
        raise wrong(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise wrong("larger than 1 MiB")
    try:
        documents = [d for d in yaml.load_all(raw.decode("utf-8-sig"), _Loader) if d is not None]  # noqa: S506
    except UnicodeDecodeError:
        raise wrong("not valid YAML: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise wrong(f"not valid YAML{where}: {' '.join((error.problem or 'unreadable').split())}") from None
    except RecursionError:
        raise wrong("not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # NB: PyYAML lets the errors of explicit tags (`!!int ""`, `!!bool x`) through as they are.
        raise wrong(f"not valid YAML: {getattr(error, 'reason', None) or 'a value does not fit its tag'}") from None
    if len(documents) != 1:
        raise wrong(f"expected one document, got {len(documents)}" if documents else "the file is empty")
    return documents[0]
