"""Reading of a job's pod templates, `worker.template` and each pool's, without fields that the operator ignores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.pod_templates import KEYED, placement
from bamboo_core.job.spec import JobSpec
from bamboo_core.names import (
    ENV_CA,
    ENV_COORDINATOR,
    ENV_GRACE,
    ENV_HOST,
    ENV_TOKEN_FILE,
    ENV_WORKER,
    GROUP,
    LABEL_QUEUE,
    LABEL_QUEUE_PRIORITY,
    TOKEN_FOLDER,
)
from bamboo_core.names import TRAINER_CONTAINER as TRAINER

TOKEN_VOLUME = "bamboo-token"  # noqa: S105
OWN_ENV = (ENV_WORKER, ENV_COORDINATOR, ENV_TOKEN_FILE, ENV_HOST, ENV_CA, ENV_GRACE)

_LISTS = ("tolerations", "topologySpreadConstraints", "nodeSelectorTerms", "matchExpressions", *KEYED)
_MAPS = (
    *("metadata", "spec", "labels", "annotations", "nodeSelector", "affinity", "nodeAffinity", "securityContext"),
    *("requiredDuringSchedulingIgnoredDuringExecution", "resources", "limits", "requests"),
)


@dataclass(slots=True)
class ReadTemplate:
    """A template's effective part, and a sentence for each ignored field. path: the template's path in the spec."""

    path: str
    template: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_templates(job: JobSpec, pools: Iterable[NodePool]) -> list[ReadTemplate]:
    """Return `worker.template` and these pools' templates, without malformed, unknown and operator-set fields.

    The API server checks the rest.
    """
    of_pools = [_read(job, one.template, f"nodePools[{one.name}].template", (one,)) for one in pools if one.template]
    return [_read(job, job.worker.template, "worker.template", job.node_pools), *of_pools]


def _read(job: JobSpec, template: Mapping[str, Any], path: str, pools: Sequence[NodePool]) -> ReadTemplate:
    reading = ReadTemplate(path)
    whole = _well_formed(dict(template), path, reading.problems)
    refuse = _Refusal(reading.problems)
    refuse(whole, path, lambda k: k not in ("metadata", "spec"), "is not part of a pod template")
    whole = {key: value for key, value in whole.items() if value is not None}
    metadata, spec = whole.setdefault("metadata", {}), whole.setdefault("spec", {})
    if spec.get("containers", ()) is None:
        del spec["containers"]
    refuse(metadata, f"{path}.metadata", lambda k: k not in ("labels", "annotations"))
    refuse(metadata.get("labels") or {}, f"{path}.metadata.labels", _own_label(job))
    refuse(spec, f"{path}.spec", lambda k: k == "restartPolicy")
    refuse.items(spec, f"{path}.spec", "volumes", lambda v: v.get("name") == TOKEN_VOLUME)
    for container in spec.get("containers") or ():
        if container["name"] == TRAINER:
            inner = f"{path}.spec.containers[{TRAINER}]"
            refuse.items(container, inner, "env", lambda v: v.get("name") in OWN_ENV)
            refuse.items(container, inner, "volumeMounts", _over_token)
    reading.problems += _selectors(job, spec, path, pools)
    reading.template = whole
    return reading


def _own_label(job: JobSpec) -> Callable[[str], bool]:
    own: set[str] = set()
    if job.queue is not None:
        own.add(LABEL_QUEUE)
        if job.queue.priority_class or job.queue.growth_priority_class:
            own.add(LABEL_QUEUE_PRIORITY)
    return lambda key: key.startswith(f"{GROUP}/") or key in own


def _over_token(mount: Mapping[str, Any]) -> bool:
    """Return whether a mount uses the token's volume, or is at, above or below the token's folder."""
    path, folder = str(mount.get("mountPath", "")).rstrip("/") + "/", f"{TOKEN_FOLDER}/"
    return mount.get("name") == TOKEN_VOLUME or folder.startswith(path) or path.startswith(folder)


def _selectors(job: JobSpec, spec: Mapping[str, Any], path: str, pools: Sequence[NodePool]) -> list[str]:
    """Return a sentence for each node selector that a pool's preset overrides; the selectors stay in `spec`."""
    asked = spec.get("nodeSelector") or {}
    return [
        f"{path}.spec.nodeSelector.{key}: ignored in node pool {pool.name}, whose preset sets it to {value}"
        for pool in pools
        for key, value in placement(job, pool).selector.items()
        if asked.get(key) not in (None, value)
    ]


@dataclass(slots=True)
class _Refusal:
    """A filter that removes unknown and operator-set fields and list items of a template, and notes each problem."""

    problems: list[str]

    def __call__(
        self,
        values: dict[str, Any],
        path: str,
        is_ours: Callable[[str], bool],
        why: str = "is set by the operator",
    ) -> None:
        for key in [key for key in values if is_ours(key)]:
            del values[key]
            self.problems.append(f"{path}.{key}: ignored, it {why}")

    def items(self, parent: dict[str, Any], path: str, name: str, is_ours: Callable[[Any], bool]) -> None:
        key = KEYED[name]
        for item in [item for item in parent.get(name) or () if is_ours(item)]:
            parent[name].remove(item)
            self.problems.append(f"{path}.{name}[{item[key]}]: ignored, it is set by the operator")


def _well_formed(values: dict[str, Any], path: str, problems: list[str]) -> dict[str, Any]:
    """Return a deep copy without the malformed fields among `_MAPS` and `_LISTS`; add a problem for each of them."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        inner, wrong = f"{path}.{key}", None
        if value is not None and key in _MAPS and not isinstance(value, dict):
            wrong = "expected an object"
        elif value is not None and key in _LISTS:
            wrong = _list_problem(value, KEYED.get(key))
        if wrong:
            problems.append(f"{inner}: ignored, {wrong}")
        else:
            kept[key] = _copy(value, inner, problems)
    return kept


def _list_problem(value: Any, key: str | None) -> str | None:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return "expected a list of objects"
    if key and not all(isinstance(item.get(key), str) and item[key] for item in value):
        return f"expected every item to have a {key}"
    return None


def _copy(value: Any, path: str, problems: list[str]) -> Any:
    if isinstance(value, dict):
        return _well_formed(value, path, problems)
    if isinstance(value, list):
        return [_copy(item, f"{path}[{index}]", problems) for index, item in enumerate(value)]
    return value
