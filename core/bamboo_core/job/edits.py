"""Edits of a running job, which follows only fields whose marks permit it, and digests of a job's settings."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from hashlib import sha256
from typing import Any

from bamboo_core.job.model import ApiField, Mark, Object, api_fields
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.training_spec import TrainingSpec

# The fields of the training that are always in the digest of its numbers. Other fields are left out while they have
# their default, so that a new field does not change the digest of an older checkpoint.
_ALWAYS_IN_NUMBERS = ("global_batch_size", "micro_batch_size", "seed", "precision", "max_gradient_norm")
MOST_NAMED = 10  # fields in one sentence


def apply_edit_to_manifest(old: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest in force after an edit of `old` to `wanted`: fixed fields keep their values."""
    spec = _edited(JobSpec, old["spec"], wanted.get("spec") or {}, stays=False)
    return {**deepcopy(dict(old)), "spec": deepcopy(spec)}


def _edited(kind: type, old: Mapping[str, Any], wanted: Mapping[str, Any], *, stays: bool) -> dict[str, Any]:
    """Return `old` with the fields of `wanted` that an edit may change. stays: only FREE fields may change."""
    edited: dict[str, Any] = {}
    for one in api_fields(kind):
        now, then = old.get(one.name), wanted.get(one.name)
        if isinstance(one.form, Object) and (not one.form.optional or (now is not None and then is not None)):
            inner = _edited(one.form.kind, now or {}, then or {}, stays=_stays(one, stays))
            edited |= {one.name: inner} if inner or one.form.optional else {}
        else:
            source = old if _stays(one, stays) else wanted
            edited |= {one.name: source[one.name]} if one.name in source else {}
    return edited


def _stays(one: ApiField, object_stays: bool) -> bool:
    marked = bool(one.marks & {Mark.FIXED, Mark.WHILE_SUSPENDED})
    return Mark.FREE not in one.marks and (object_stays or marked)


def refused_fields(followed: JobSpec, wanted: JobSpec) -> tuple[str, ...]:
    """Return the paths of the changed fields that a running job does not follow, such as spec.training.steps. followed:
    the spec in force after the edit.
    """
    return tuple(dict.fromkeys(_differences(followed, wanted, "spec")))


def refusal_message(names: tuple[str, ...]) -> str:
    """Return the message to the user about refused fields."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names[:MOST_NAMED])}{more}: {verb} fixed while the job runs; the job keeps the original values"


def task_digest(spec: JobSpec) -> str:
    """Return a digest (16 hex digits) of the task's entrypoint and of its config, as the manifest gives them."""
    task = [spec.task.entrypoint, dict(spec.task.config)]
    return sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:16]


def numbers_digest(spec: JobSpec) -> str:
    """Return a sha256 digest of the settings on which the trained weights depend. It is the same on every grid.

    These are the task, its initial weights, the number of gradient groups, and the fields of the training that are not
    marked NO_NUMBERS; most of them are left out if they have their default. A job continues only from checkpoints with
    the same digest.
    """
    training = {}
    for one in api_fields(TrainingSpec):
        value = getattr(spec.training, one.attribute)
        usual = one.default is not None and value == one.default() and one.attribute not in _ALWAYS_IN_NUMBERS
        if Mark.NO_NUMBERS not in one.marks and not usual:
            training[one.attribute] = value
    initial = [asdict(spec.task.initial_from)] if spec.task.initial_from else []
    numbers = [task_digest(spec), training, spec.training.groups, *initial]
    return sha256(json.dumps(numbers, sort_keys=True, default=str).encode()).hexdigest()


def _differences(one: Any, other: Any, path: str) -> Iterator[str]:
    """Yield the paths of the innermost fields in which the two objects differ."""
    if one == other:
        return
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            name = _spelled(type(one), field.name)
            yield from _differences(getattr(one, field.name), getattr(other, field.name), f"{path}.{name}")
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            if key in one and key in other:
                yield from _differences(one[key], other[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    else:
        yield path


def _spelled(kind: type, attribute: str) -> str:
    """Return the manifest's name for an attribute of `kind`, such as globalBatchSize for global_batch_size."""
    field = attribute.removeprefix("chooses_")  # an attribute of ours, for a field that the manifest leaves out
    return next((one.name for one in api_fields(kind) if one.attribute == field), field)
