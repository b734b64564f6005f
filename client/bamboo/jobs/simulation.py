"""The results of a job's simulated runs, in the Python API."""

import io
from dataclasses import asdict
from typing import Any

from rich.console import Console

from bamboo.jobs.simulating import Simulated
from bamboo.simulation.figures import Spread, spread
from bamboo.terminal.simulation_table import simulation_table

WIDTH = 1000  # columns, so that no line wraps


class SimulatedRuns:
    """The runs of each case: a rate of preemptions, or a recording. Printed, it is a table of means."""

    def __init__(self, found: Simulated) -> None:
        self._found = found
        self.warnings = found.warnings

    @property
    def cases(self) -> dict[str, Spread]:
        """The means and deviations of each case's figures; docs/simulator.md explains them."""
        return {one.name: spread([run.figures for run in one.runs]) for one in self._found.cases}

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The figures of each run, and how it ended."""
        return [
            {"case": case.name, **asdict(run.figures), "outcome": run.outcome, "message": run.message}
            for case in self._found.cases
            for run in case.runs
        ]

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(simulation_table(list(self.cases.items())))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"<SimulatedRuns of {self._found.spec.name}: {', '.join(self.cases)}>"
