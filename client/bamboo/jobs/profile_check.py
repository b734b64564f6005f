"""A check before a job is simulated: is the profile one of its model?"""

from collections.abc import Mapping

from bamboo.local.job_source import JobSource
from bamboo.local.trainer_calls.task_check import count_layers
from bamboo.profiles.files import AT, read_profile, shipped_names
from bamboo.simulation.profile_match import doubt, mismatch, needs_layers, slowness
from bamboo_core.planning.profile import ModelProfile, ProfileError


def check_profiles(profiles: Mapping[str, ModelProfile], job: JobSource) -> list[str]:
    """What may be wrong with profiles for that job, in sentences. profiles: by the names that the user knows them by.

    The task is loaded only if a profile is not known to be of it. Raises ProfileError if one has another number of
    layers.
    """
    spec, told = job.spec, list[str]()
    asked = any(needs_layers(profile, spec) for profile in profiles.values())
    layers = count_layers(job.document, job.folders) if asked else ""
    for name, profile in profiles.items():
        unknown = ""
        if needs_layers(profile, spec):
            if isinstance(layers, str):
                unknown = layers
            elif wrong := mismatch(name, profile, spec, layers):
                raise ProfileError(f"{job.name}: {wrong}")
        told += filter(None, (doubt(name, profile, spec, unknown), _slowness(name, profile)))
    return told


def _slowness(name: str, profile: ModelProfile) -> str:
    """A sentence on a profile that comes with Bamboo: how its model's speed compares with what its device can do. Empty
    for any other profile.
    """
    if name not in shipped_names():
        return ""
    model, device = name.rsplit("-", 1)
    return slowness(name, profile, read_profile(f"{model}{AT}{device}"))
