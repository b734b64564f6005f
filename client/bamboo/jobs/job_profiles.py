"""Profiles (times and sizes of a model's layers) for a job's plans and simulations, checked against the job's model."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final

from bamboo.job_source import JobSource
from bamboo.local.trainer_calls.task_check import count_layers
from bamboo.local.trainer_calls.task_profile import count_task, task_of
from bamboo.local.trainer_calls.trainer_process import TrainerError
from bamboo.profiles.files import read_profile
from bamboo_core.planning.profile import ModelProfile, ProfiledTask, ProfileError
from bamboo_core.text import count

SHOWN: Final = 200  # characters of a value in a sentence
_FIELDS: Final = {
    "entrypoint": "task.entrypoint",
    "config": "task.config",
    "precision": "training.precision",
    "parameter_precision": "training.parameterPrecision",
    "boundary_precision": "training.boundaryPrecision",
}


def read_profiles(job: JobSource, names: Iterable[str]) -> tuple[dict[str, ModelProfile], list[str]]:
    """Read profiles; return them by name, and a warning for each profile that may be of another model.

    The job's task is loaded only for @DEVICE, or if a profile names another task or none. Raises ProfileError for a
    profile that cannot be read, or has another number of layers than the job's model.
    """
    counts, layers = cache(lambda: count_task(job)), cache(lambda: count_layers(job.document, job.folders))
    profiles = {name: read_profile(name, counts) for name in names}
    return profiles, [text for name, profile in profiles.items() for text in _doubts(name, profile, job, layers)]


def _doubts(name: str, profile: ModelProfile, job: JobSource, layers: Callable[[], int]) -> Iterator[str]:
    """Yield a warning if the profile may be of another model; raise ProfileError if the number of layers differs.

    layers: returns the number of layers of the job's model.
    """
    mine, its, unknown = task_of(job.spec), profile.task, ""
    if its is None or (its.entrypoint, its.config) != (mine.entrypoint, mine.config):
        try:
            found = layers()
        except TrainerError as error:
            unknown = f"; the number of layers of the job's model is unknown here ({error})"
        else:
            if found != len(profile.layers):
                raise ProfileError(f"{job.name}: {_mismatch(name, profile, mine, found)}")
            if its is None:
                return  # written by hand, and it fits
    if differences := _differences(its, mine):
        yield (
            f"the profile {name} may be of another model: {'; '.join(differences)}{unknown}. All figures are those of"
            f" its {count(len(profile.layers), 'layer')}"
        )


def _differences(its: ProfiledTask | None, mine: ProfiledTask) -> list[str]:
    """Describe how a profile's task differs from the job's, field by field; or say that the profile names no task."""
    if its is None:
        return ["it does not name its task (field task)"]
    pairs = [(name, getattr(its, field), getattr(mine, field)) for field, name in _FIELDS.items()]
    return [f"its {name} is {_shown(one)}, and the job's is {_shown(two)}" for name, one, two in pairs if one != two]


def _mismatch(name: str, profile: ModelProfile, mine: ProfiledTask, layers: int) -> str:
    of = f"; of {profile.task.entrypoint} with {_shown(profile.task.config)}" if profile.task else ""
    return (
        f"the profile {name} has {count(len(profile.layers), 'layer')} (field layers{of}), and the job's model"
        f" {layers} (task.entrypoint {mine.entrypoint} with {_shown(mine.config)}): its figures would be those of"
        " another model; bamboo profile measures the job's own"
    )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
