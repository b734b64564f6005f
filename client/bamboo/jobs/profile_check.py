"""A check that a simulated job's profile is of its model."""

from collections.abc import Mapping

from bamboo.local.job_source import JobSource
from bamboo.local.trainer_calls.task_check import count_layers
from bamboo.profiles.files import AT, read_profile, shipped_names
from bamboo.simulation.profile_match import doubt, mismatch, needs_layers, slowness
from bamboo_core.planning.profile import ModelProfile, ProfileError


def check_profiles(profiles: Mapping[str, ModelProfile], job: JobSource) -> list[str]:
    """Return sentences about possible mistakes in profiles for the job. profiles: by the user's names for them.

    It loads the task only if a profile is not known to be of it. Raises ProfileError if the numbers of layers differ.
    """
    spec, warnings = job.spec, list[str]()
    asked = any(needs_layers(profile, spec) for profile in profiles.values())
    layers = count_layers(job.document, job.folders) if asked else ""
    for name, profile in profiles.items():
        unknown = ""
        if needs_layers(profile, spec):
            if isinstance(layers, str):
                unknown = layers
            elif wrong := mismatch(name, profile, spec, layers):
                raise ProfileError(f"{job.name}: {wrong}")
        warnings += filter(None, (doubt(name, profile, spec, unknown), _slowness(name, profile)))
    return warnings


def _slowness(name: str, profile: ModelProfile) -> str:
    """Compare the speed in one of Bamboo's own profiles with its device's peak; "" for other profiles."""
    if name not in shipped_names():
        return ""
    model, device = name.rsplit("-", 1)
    return slowness(name, profile, read_profile(f"{model}{AT}{device}"))
