"""The text that `bamboo plan` prints."""

from dataclasses import replace

import pytest

from bamboo.sizing.choice import Alternative, Bounds
from bamboo.sizing.search import SearchResult, Shortlist
from bamboo.sizing.trials.trial import Assessment
from bamboo.terminal.plan_table import PlanReport, plan_text
from bamboo_core.job.spec import RedundancyMode
from job_simulation_kit import manifest
from sizing_kit import assessed, layered, world


def text(front: tuple[Assessment, ...], *, too_large: int = 0, width: int | None = None) -> str:
    instead = Alternative(label="1 on standby", hours=2.0, usd=5.0, traffic_usd=0.0)
    listed = Shortlist(candidates=(), estimated=(), grids=9, too_large=too_large)
    found = SearchResult(shortlist=listed, simulated=front, front=front, chosen=front[0])
    at = world(manifest(2, 1, 4), layered(2))
    return plan_text(PlanReport(found=found, reasons=("Why.",), instead=(instead,), bounds=Bounds(), world=at), width)


def test_the_text_says_what_is_measured_estimated_and_chance() -> None:
    said = " ".join(text((assessed(2, (2.0, 4.0)),), too_large=3).split())
    assert "Looked at: 9 grids, of which 3 need more memory than the machine has; " in said
    assert "chose 1 plan, simulated in 1 run. ± is how far these runs differ by chance, and nothing else. " in said
    assert said.endswith("Expect a real job to reach 0.8 to 1.0 of the simulated speed.")
    assert "Only estimated: " not in said
    half = said_of_microbatches(2)
    assert "Measured: layers.bytes, " in half
    assert "Only estimated: layers.seconds of microbatches of 2 (in proportion)." in half


def said_of_microbatches(samples: int) -> str:
    one = assessed(2, (2.0, 4.0))
    return " ".join(text((replace(one, candidate=replace(one.candidate, micro_batch=samples)),)).split())


def test_of_a_single_worker_nothing_is_said_that_it_cannot_have() -> None:
    """The text lists a mode that all plans with several workers share once, below the table, even if the table also has
    a plan with a single worker, which has no mode.
    """
    front = assessed(2, (2.0, 4.0)), assessed(3, (2.5, 3.5)), assessed(1, (8.0, 3.0))
    said = text(front)
    assert "In all of them: machine m, microbatch 4, mode Replicas, replicas 1" in said
    assert "MODE" not in said
    bare = replace(front[1].candidate, mode=RedundancyMode.NONE)
    differing = text((front[0], Assessment(candidate=bare, outcomes=front[1].outcomes), front[2]))
    (alone,) = (line for line in differing.splitlines() if "  1 x 1" in line)
    assert "MODE" in differing
    assert "Replicas" not in alone


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    front = assessed(2, (2.0, 4.0), (3.0, 5.0)), assessed(3, (2.5, 3.5)), assessed(1, (8.0, 3.0))
    assert max(map(len, text(front, width=width).splitlines())) <= width
