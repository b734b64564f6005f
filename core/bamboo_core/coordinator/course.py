"""The phase of a job, as its coordinator sees it."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["Pending", "Recovering", "Running", "Restoring", "Over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCourse:
    """The phase of the job. since: when the phase began, in seconds.

    Recovering: after the coordinator's own restart, until the workers are back. Restoring: the job goes back to a
    checkpoint.
    """

    phase: Phase = "Pending"
    since: float = 0.0
