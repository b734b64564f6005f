"""What `bamboo plan` prints."""

from dataclasses import replace

import pytest

from bamboo.sizing.choice import Alternative, Bounds
from bamboo.sizing.search import Counts, SearchResult
from bamboo.sizing.trials.trial import Assessment
from bamboo.terminal.plan_table import PlanReport, plan_text
from bamboo_core.job.spec import RedundancyMode
from job_simulation_kit import manifest
from sizing_kit import assessed, layered, world


def text(front: tuple[Assessment, ...], counts: Counts, width: int | None = None) -> str:
    found = SearchResult(front=front, ends=front, chosen=front[0], calm=(), counts=counts)
    instead = Alternative(label="1 on standby", hours=2.0, usd=5.0, traffic_usd=0.0)
    at = world(manifest(2, 1, 4), layered(2))
    return plan_text(PlanReport(found=found, told=("Why.",), instead=(instead,), bounds=Bounds(), world=at), width)


def test_what_was_looked_at_is_counted_in_words() -> None:
    one = text((assessed(2, (2.0, 4.0)),), Counts(grids=1, simulated=1, runs=1))
    assert "Looked at: 1 grid; 1 plan simulated in 1 run." in one
    noise = "± is how far these runs differ by chance; how far the simulation is from a real job is not in it."
    assert noise in " ".join(one.split())
    more = text((assessed(2, (2.0, 4.0)),), Counts(grids=2, too_large=1, simulated=3, runs=4))
    assert "Looked at: 2 grids, left out 1 too large for the machine's memory; 3 plans simulated in 4 runs." in more


def test_of_a_single_worker_nothing_is_said_that_it_cannot_have() -> None:
    """So what the other plans agree on is said once, below the table."""
    front = assessed(2, (2.0, 4.0)), assessed(3, (2.5, 3.5)), assessed(1, (8.0, 3.0))
    said = text(front, Counts(grids=3))
    assert "In all of them: machine m, microbatch 4, mode Replicas, replicas 1" in said
    assert "MODE" not in said
    bare = replace(front[1].candidate, mode=RedundancyMode.NONE)
    differing = text((front[0], Assessment(candidate=bare, outcomes=front[1].outcomes), front[2]), Counts(grids=3))
    (alone,) = (line for line in differing.splitlines() if "  1 x 1" in line)
    assert "MODE" in differing
    assert "Replicas" not in alone


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    front = assessed(2, (2.0, 4.0), (3.0, 5.0)), assessed(3, (2.5, 3.5)), assessed(1, (8.0, 3.0))
    assert max(map(len, text(front, Counts(grids=3), width).splitlines())) <= width
