"""What of an edited spec a running job takes over, and what of it is fixed from its beginning to its end."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass, replace
from hashlib import sha256
from typing import Any

from bamboo.job.placement_spec import WorkerSpec
from bamboo.job.spec import JobSpec
from bamboo.job.training_spec import ParameterPrecision

CHANGEABLE = (  # beside topology.pipelines and schedule, redundancy.mode and replicas
    "suspend",
    "elastic",
    "standby",
    "node_pools",
    "budget",
    "worker",
    "rollout",
    "clean_pod_policy",
    "ttl_seconds_after_finished",
    "active_deadline_seconds",
    "progress_deadline_seconds",
    "disruption_budget",
)
CHANGEABLE_INSIDE = {"topology": ("pipelines", "schedule"), "redundancy": ("mode", "replicas")}
FIXED_INSIDE = {"worker": ("devices",)}
# For how long; what becomes of steps that would otherwise end the job; what is only measured; whether kernels may add
# in any order, or are compiled; and two by what follows from them, `groups`.
_NO_NUMBERS = (
    "steps",
    "until",
    "non_finite",
    "max_consecutive_skips",
    "evaluation",
    "loggers",
    "deterministic",
    "compile",
    "reproducible",
    "gradient_groups",
)
MOST_NAMED = 10  # fields in one sentence
_SPELLED = {
    "transfer_mbps": "transferMBps",
    "claim_name": "persistentVolumeClaim.claimName",
    "chooses_stages": "stages",  # Auto
}


def apply_edit(old: JobSpec, wanted: JobSpec) -> JobSpec:
    """The spec in force from now on. If it is not `wanted`, the edit asks for what cannot be."""
    topology = replace(old.topology, pipelines=wanted.topology.pipelines, schedule=wanted.topology.schedule)
    if old.topology.chooses_stages and wanted.topology.chooses_stages:
        topology = replace(topology, stages=wanted.topology.stages)  # which bounds in `elastic` say
    redundancy = replace(old.redundancy, mode=wanted.redundancy.mode, replicas=wanted.redundancy.replicas)
    changed = {name: getattr(wanted, name) for name in CHANGEABLE}
    for name, inner in FIXED_INSIDE.items():
        changed[name] = replace(changed[name], **{field: getattr(getattr(old, name), field) for field in inner})
    return replace(old, topology=topology, redundancy=redundancy, **changed)


def apply_edit_to_manifest(old: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The same for manifests: the one whose spec is the one in force, if both are valid, and it is, too."""
    before, after = old["spec"], wanted.get("spec") or {}
    changed = {_spelled(name) for name in CHANGEABLE}
    spec = {key: value for key, value in before.items() if key not in changed}
    spec |= {key: value for key, value in after.items() if key in changed}
    for name, kept in FIXED_INSIDE.items():
        fixed = {key: value for key, value in (before.get(name) or {}).items() if key in kept}
        if fixed or name in spec:
            spec[name] = {key: value for key, value in (spec.get(name) or {}).items() if key not in kept} | fixed
    for name, inner in CHANGEABLE_INSIDE.items():
        values = {key: value for key, value in (before.get(name) or {}).items() if key not in inner}
        spec[name] = values | {key: value for key, value in (after.get(name) or {}).items() if key in inner}
    return {**deepcopy(dict(old)), "spec": deepcopy(spec)}


def refused_fields(old: JobSpec, wanted: JobSpec) -> tuple[str, ...]:
    """The fields of the edited spec that a running job does not take over, as a manifest names them."""
    return tuple(dict.fromkeys(_differences(apply_edit(old, wanted), wanted, "spec")))


def refusal_message(names: tuple[str, ...]) -> str:
    """What the user is told of these fields."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names[:MOST_NAMED])}{more}: {verb} fixed while the job runs; the job keeps the original values"


def worker_digest(worker: WorkerSpec) -> str:
    """Of a job's `worker` section as its user wrote it, but for what is fixed."""
    section = {name: value for name, value in asdict(worker).items() if name not in FIXED_INSIDE["worker"]}
    return sha256(json.dumps(section, sort_keys=True, default=str).encode()).hexdigest()[:10]


def task_digest(spec: JobSpec) -> str:
    """Of what the model is made from, as its user wrote it: no default is in it, which another version could change."""
    task = [spec.task.entrypoint, dict(spec.task.config)]
    return sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:16]


def numbers_digest(spec: JobSpec) -> str:
    """Of all that a training's numbers depend on: its task and its training section, but for how long it goes on.

    The same on every grid. A checkpoint goes on only in a job with the same one.
    """
    training = {name: value for name, value in asdict(spec.training).items() if name not in _NO_NUMBERS}
    if spec.training.ema is None:
        del training["ema"]
    for name in ("parameter_precision", "boundary_precision", "gradient_precision"):
        if training[name] is ParameterPrecision.FP32:
            del training[name]
    training["loss_scale"] = spec.training.scaling and asdict(spec.training.scaling)
    if training["loss_scale"] is None:
        del training["loss_scale"]
    numbers = [task_digest(spec), training, spec.training.groups]
    return sha256(json.dumps(numbers, sort_keys=True, default=str).encode()).hexdigest()


def _differences(one: Any, other: Any, path: str) -> Iterator[str]:
    """The innermost fields in which these two differ."""
    if one == other:
        return
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            yield from _differences(
                getattr(one, field.name), getattr(other, field.name), f"{path}.{_spelled(field.name)}"
            )
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            if key in one and key in other:
                yield from _differences(one[key], other[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    else:
        yield path


def _spelled(name: str) -> str:
    """A field's name in a manifest."""
    first, *rest = name.split("_")
    return _SPELLED.get(name) or first + "".join(part.capitalize() for part in rest)
