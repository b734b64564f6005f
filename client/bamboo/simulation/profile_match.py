"""Checks that a profile is of the job's model. Another model's profile would give meaningless figures. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Final

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ModelProfile, ProfiledTask
from bamboo_core.text import count

FAR: Final = 2.0  # ratio of times from which a profile is no estimate of its device
SHOWN: Final = 200  # characters of a config in a sentence


def task_of(spec: JobSpec) -> ProfiledTask:
    """Return the task that a profile of this job records."""
    training = spec.training
    config: dict[str, Any] = json.loads(json.dumps(spec.task.config))
    return ProfiledTask(
        entrypoint=spec.task.entrypoint,
        config=config,
        precision=training.precision.value,
        parameter_precision=training.parameter_precision.value,
        boundary_precision=training.boundary_precision.value,
    )


def differences(profile: ModelProfile, spec: JobSpec) -> tuple[str, ...]:
    """Return the profile's differences from the job, field by field, or that it does not name its task."""
    mine, its = task_of(spec), profile.task
    if its is None:
        return ("it does not say of which task it is (field task)",)
    problems = []
    if its.entrypoint != mine.entrypoint:
        problems.append(f"it is of {its.entrypoint}, and the job's task.entrypoint is {mine.entrypoint}")
    if its.config != mine.config:
        problems.append(f"it is of the config {_shown(its.config)}, and the job's task.config is {_shown(mine.config)}")
    for field, name in _PRECISIONS.items():
        if getattr(its, field) != getattr(mine, field):
            problems.append(f"it was measured in {getattr(its, field)}, and training.{name} is {getattr(mine, field)}")
    return tuple(problems)


def needs_layers(profile: ModelProfile, spec: JobSpec) -> bool:
    """Return whether the task's number of layers has to be checked, because the profile is not known to be of it."""
    its = profile.task
    return its is None or (its.entrypoint, its.config) != (spec.task.entrypoint, task_of(spec).config)


def mismatch(name: str, profile: ModelProfile, spec: JobSpec, layers: int) -> str:
    """Return a sentence if the job's model has another number of layers than the profile; "" if not. name: the
    profile's.
    """
    if layers == len(profile.layers):
        return ""
    of = f"; of {profile.task.entrypoint} with {_shown(profile.task.config)}" if profile.task else ""
    return (
        f"the profile {name} has {count(len(profile.layers), 'layer')} (field layers{of}), and the job's model"
        f" {layers} (task.entrypoint {spec.task.entrypoint} with {_shown(task_of(spec).config)}): its figures would be"
        " those of another model; bamboo profile measures the job's own"
    )


def doubt(name: str, profile: ModelProfile, spec: JobSpec, unknown: str = "") -> str:
    """Return a sentence if the profile may be of another model; "" if it is the job's. unknown: why the number of the
    model's layers is unknown; "" if it is known and equal.
    """
    problems = differences(profile, spec)
    if not problems:
        return ""
    if profile.task is None and not unknown:
        return ""  # by hand, and it fits
    so = f"; how many layers the job's model has is not known here ({unknown})" if unknown else ""
    return (
        f"the profile {name} may be of another model: {'; '.join(problems)}{so}. All figures are those of its"
        f" {count(len(profile.layers), 'layer')}"
    )


def slowness(name: str, profile: ModelProfile, computed: ModelProfile) -> str:
    """Return a sentence if a profile's layers take far longer than computed from the device's figures; "" if not.
    computed: the profile of the same model and device by these figures, whose name the user may give instead.
    """
    times = _seconds_of_a_sample(profile) / _seconds_of_a_sample(computed)
    if times < FAR:
        return ""
    return (
        f"the layers of the profile {name} take what is left of a published step, {times:.1f} times as long as that"
        f" device by its figures ({computed.name}, docs/simulator.md)"
    )


def _seconds_of_a_sample(profile: ModelProfile) -> float:
    return sum(layer.forward + layer.backward for layer in profile.layers) / profile.samples


_PRECISIONS: Final = {
    "precision": "precision",
    "parameter_precision": "parameterPrecision",
    "boundary_precision": "boundaryPrecision",
}


def _shown(config: Mapping[str, Any]) -> str:
    text = json.dumps(config, sort_keys=True)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
