"""The example of docs/planning.md shows the output of the program."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def blocks() -> list[str]:
    return PAGE.read_text().split("```\n")[1::2]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it takes three minutes of processor time
def test_the_example_from_end_to_end_is_what_the_program_prints(tmp_path: Path) -> None:
    """The example is reproducible, since a search gives the same result for any number of processes."""
    (job,) = (block for block in blocks() if block.startswith("apiVersion: "))
    prices = next(block for block in blocks() if "source: the prices of the published runs" in block)
    (shown,) = (block for block in blocks() if block.startswith("$ bamboo plan job.yaml --prices"))
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "prices.yaml").write_text(prices)
    line, _, printed = shown.partition("\n")
    whole = [sys.executable, "-m", "bamboo", *shlex.split(line.removeprefix("$ bamboo "))]
    done = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=3500)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
