"""Print the table of docs/benchmarks.md in which reports of `bamboo bench` stand beside what others publish.

python bench/reports.py [REPORT.json ...]     # without any those in bench/reports/
"""

from pathlib import Path
from typing import Annotated

import typer

from bamboo.bench.published_rates import beside_published
from bamboo.bench.report import parse_report
from bamboo.profiles.files import read_devices

COMMITTED = Path(__file__).with_name("reports")


def run(files: Annotated[list[Path] | None, typer.Argument(help="Reports.")] = None) -> None:
    """Print the table."""
    chosen = files or sorted(COMMITTED.glob("*.json"))
    print(beside_published([parse_report(str(file), file.read_bytes()) for file in chosen], read_devices()))


if __name__ == "__main__":
    typer.run(run)
