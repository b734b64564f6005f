"""An operator's knowledge of a job, for its page and its metrics."""

from dataclasses import dataclass

from bamboo_core.page.history import JobHistory
from bamboo_core.view.job_view import JobView
from bamboo_operator.status.facts import StatusFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatedJob:
    """A job as its operator knows it.

    view: the spec in force (the newest one if none was ever valid) and the last written status.
    """

    view: JobView
    facts: StatusFacts
    record: JobHistory | None = None  # None if no coordinator has run here
