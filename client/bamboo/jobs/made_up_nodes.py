"""Flags for made-up nodes of `bamboo plan` and `bamboo simulate`."""

from collections.abc import Sequence

from bamboo.jobs.errors import InvalidRequest
from bamboo.simulation.job.job_zones import allowed_zones, named_zones
from bamboo_core.job.spec import JobSpec


def zones_of(spec: JobSpec, given: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Return the allowed zones of --zones, else of the job, else the default ones.

    Raises SimulationError if the job may be in none of them.
    """
    zones = () if given is None else tuple(zone.strip() for zone in given.split(","))
    return allowed_zones(spec, zones or named_zones(spec) or default)


def check_probability(flag: str, value: float) -> None:
    """Raise InvalidRequest unless the value is a probability."""
    if not 0 <= value <= 1:
        raise InvalidRequest(f"{flag} {value:g}: expected a probability from 0 to 1")
