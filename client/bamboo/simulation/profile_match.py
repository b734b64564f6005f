"""Is a profile one of the job's model? A profile of another one would give figures that mean nothing. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Final

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.profile import ModelProfile, ProfiledTask
from bamboo_core.text import count

FAR: Final = 2.0  # times as long, from which on a profile is no estimate of its device
SHOWN: Final = 200  # characters of a config in a sentence


def task_of(spec: JobSpec) -> ProfiledTask:
    """What a profile of this job says of it."""
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
    """What the profile says otherwise than the job, field by field; all of it, if it says nothing of its task."""
    mine, its = task_of(spec), profile.task
    if its is None:
        return ("it does not say of which task it is (field task)",)
    found = []
    if its.entrypoint != mine.entrypoint:
        found.append(f"it is of {its.entrypoint}, and the job's task.entrypoint is {mine.entrypoint}")
    if its.config != mine.config:
        found.append(f"it is of the config {_shown(its.config)}, and the job's task.config is {_shown(mine.config)}")
    for field, name in _PRECISIONS.items():
        if getattr(its, field) != getattr(mine, field):
            found.append(f"it was measured in {getattr(its, field)}, and training.{name} is {getattr(mine, field)}")
    return tuple(found)


def needs_layers(profile: ModelProfile, spec: JobSpec) -> bool:
    """Has the task to be asked how many layers it has, since the profile is not known to be of it?"""
    its = profile.task
    return its is None or (its.entrypoint, its.config) != (spec.task.entrypoint, task_of(spec).config)


def mismatch(name: str, profile: ModelProfile, spec: JobSpec, layers: int) -> str:
    """A sentence if the job's model has another number of layers than the profile; "" if not. name: of the profile."""
    if layers == len(profile.layers):
        return ""
    of = f"; of {profile.task.entrypoint} with {_shown(profile.task.config)}" if profile.task else ""
    return (
        f"the profile {name} has {count(len(profile.layers), 'layer')} (field layers{of}), and the job's model"
        f" {layers} (task.entrypoint {spec.task.entrypoint} with {_shown(task_of(spec).config)}): its figures would be"
        " those of another model; bamboo profile measures the job's own"
    )


def doubt(name: str, profile: ModelProfile, spec: JobSpec, unknown: str = "") -> str:
    """A sentence if the profile may be of another model; "" if it is the job's. unknown: why nobody knows how many
    layers the job's model has, "" if it has as many.
    """
    found = differences(profile, spec)
    if not found:
        return ""
    if profile.task is None and not unknown:
        return ""  # by hand, and it fits
    so = f"; how many layers the job's model has is not known here ({unknown})" if unknown else ""
    return (
        f"the profile {name} may be of another model: {'; '.join(found)}{so}. All figures are those of its"
        f" {count(len(profile.layers), 'layer')}"
    )


def slowness(name: str, profile: ModelProfile, computed: ModelProfile) -> str:
    """A sentence if a profile's layers take far longer than the device by its figures; "" if not. computed: of the same
    model and device, whose name is what the user may give instead.
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
