"""Jobs that are deleted: their workers end at once, not when their pods' grace period does. In virtual time."""

import re
from dataclasses import replace

import pytest

from bamboo_core.names import EXIT_DRAINED
from opsim_nodes import GRACE_SECONDS
from opsim_scenario import Disturbance, DisturbanceKind, scenario
from opsim_simulation import OperatorSimulation

DELETED = 60.0
BACKGROUND, FOREGROUND = 1, 0  # an act's number
AWAY_SECONDS = 3.0
RESTART = Disturbance(kind=DisturbanceKind.OPERATOR, at=DELETED - 0.05, seconds=AWAY_SECONDS, number=0)


def each(fast: int) -> pytest.MarkDecorator:
    """A seed and the way of the deletion. One of them is not slow: seed 0 with that way."""
    ways = {"background": BACKGROUND, "foreground": FOREGROUND}
    return pytest.mark.parametrize(
        ("seed", "number"),
        [
            pytest.param(seed, way, id=f"{seed}-{name}", marks=() if (seed, way) == (0, fast) else pytest.mark.slow)
            for seed in range(3)
            for name, way in ways.items()
        ],
    )


def ends(seed: int, number: int, *others: Disturbance) -> list[tuple[float, int]]:
    """After how many seconds each worker of the deleted job ended, and how."""
    delete = Disturbance(kind=DisturbanceKind.RECREATE, at=DELETED, seconds=1000.0, number=number)
    lines: list[str] = []
    simulation = OperatorSimulation(replace(scenario(seed), disturbances=(*others, delete), careful=True), lines.append)
    result = simulation.run()
    assert result.problem is None, result
    found = [re.fullmatch(r" *([0-9.]+)  \S+ has ended with (-?\d+)", line) for line in lines]
    ended = [(float(match[1]) - DELETED, int(match[2])) for match in found if match]
    return [(seconds, code) for seconds, code in ended if 0 < seconds < 100]


@each(fast=BACKGROUND)
def test_workers_of_a_deleted_job_stop_at_once(seed: int, number: int) -> None:
    found = ends(seed, number)
    assert len(found) >= 2
    assert all(seconds < GRACE_SECONDS / 3 and code == EXIT_DRAINED for seconds, code in found), found


@each(fast=FOREGROUND)
def test_they_stop_as_soon_as_an_operator_is_back(seed: int, number: int) -> None:
    """Of a job that is gone by then it hears only by the pods that are left."""
    found = ends(seed, number, RESTART)
    assert len(found) >= 2
    assert all(seconds < AWAY_SECONDS + GRACE_SECONDS / 3 and code == EXIT_DRAINED for seconds, code in found), found
