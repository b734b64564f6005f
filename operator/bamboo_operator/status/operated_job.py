"""What an operator knows of a job that it runs, for whoever shows it: its page and its metrics."""

from dataclasses import dataclass, field

from bamboo_core.coordinator.events import Status
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.page.history import JobHistory
from bamboo_operator.status.facts import StatusFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatedJob:
    """What an operator knows of a job: its spec and what is counted, its status, and what a coordinator says."""

    namespace: str
    name: str
    facts: StatusFacts
    written: BambooJobStatus = field(default_factory=BambooJobStatus)  # as it was written last
    status: Status | None = None  # of its coordinator, None if there is none
    record: JobHistory | None = None  # None if no coordinator has run here

    @property
    def spec(self) -> JobSpec | None:
        """The one in force; None if there never was a valid one."""
        return self.facts.spec
