"""The result of `Job.plan`: the Pareto-optimal plans and the recommended job."""

import json
from typing import TYPE_CHECKING, Any

import yaml

from bamboo.job_source import JobSource, source_of_manifest
from bamboo.sizing.trials.candidate import edited, edits
from bamboo.terminal.plan_table import PlanReport, document, plan_text
from bamboo_core.job.yaml_file import source_of

if TYPE_CHECKING:
    from bamboo.jobs.job import Job


class JobPlan:
    """The plans that are Pareto-optimal in time and cost, and the recommended one. `print` shows them as a table."""

    def __init__(self, job: JobSource, report: PlanReport, warnings: tuple[str, ...]) -> None:
        self._job, self._report, self.warnings = job, report, warnings

    @property
    def recommended(self) -> "Job | None":
        """The job with the recommended plan; None if no plan completes it within the limits. `why` gives the reason."""
        from bamboo.jobs.job import Job  # which imports this module

        chosen = self._report.found.chosen
        if chosen is None:
            return None
        wanted = edited(self._job.document, edits(chosen.candidate, self._job.spec))
        text = yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)
        return Job.from_source(source_of_manifest(source_of(f"plan of {self._job.name}", text), self._job.folders))

    @property
    def why(self) -> str:
        """The reasons for the recommended plan, or why no plan is recommended."""
        return " ".join(self._report.reasons)

    @property
    def options(self) -> list[dict[str, Any]]:
        """The Pareto-optimal plans, fastest first; docs/planning.md explains the fields."""
        front: list[dict[str, Any]] = self.to_dict()["front"]
        return front

    def to_dict(self) -> dict[str, Any]:
        """Return the whole result, as `bamboo plan --output json` prints it."""
        found: dict[str, Any] = json.loads(document(self._report))
        return found

    def __str__(self) -> str:
        return plan_text(self._report)

    def __repr__(self) -> str:
        return f"<JobPlan of {self._report.world.spec.name}: {len(self._report.found.front)} options>"
