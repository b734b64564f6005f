"""What an operator knows of a job, for whoever shows it: its page and its metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bamboo_core.coordinator.events import Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.page.history import JobHistory
from bamboo_operator.status.facts import StatusFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What is known of a job."""

    namespace: str
    name: str
    spec: JobSpec | None
    facts: StatusFacts
    written: Mapping[str, Any] = field(default_factory=dict)  # the BambooJob's status
    status: Status | None = None  # of its coordinator, None if there is none
    record: JobHistory | None = None  # None if no coordinator has run here
