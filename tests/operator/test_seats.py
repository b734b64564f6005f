"""How many seats a job asks for, and what it does with fewer."""

from typing import Any

import pytest

from bamboo_core.job.spec import wanted_workers
from bamboo_operator.queues.seats import fitted, seat_bounds
from operator_kit import job

MANY = {"steps": 10, "globalBatchSize": 32, "microBatchSize": 1}


def of(pipelines: int = 2, stages: int = 2, **more: Any) -> Any:
    grid = {"topology": {"stages": stages, "pipelines": pipelines}, "training": MANY}
    return job(**{**grid, **more})


@pytest.mark.parametrize(
    ("spec", "least", "most", "unit", "standby"),
    [
        (of(), 4, 4, 2, 0),
        (of(elastic={"minPipelines": 1, "maxPipelines": 3}), 2, 6, 2, 0),
        (of(standby={"workers": 3}), 4, 4, 2, 3),
        (of(topology={}, elastic={"maxWorkers": 7}), 1, 7, 1, 0),
    ],
)
def test_a_job_asks_for_all_that_it_may_have(spec: Any, least: int, most: int, unit: int, standby: int) -> None:
    found = seat_bounds(spec)
    assert (found.least, found.most, found.unit, found.standby) == (least, most, unit, standby)
    assert most + standby == wanted_workers(spec)


@pytest.mark.parametrize("seats", [2, 3, 4, 5, 6, 9])
def test_with_fewer_seats_it_wants_no_more_workers_than_these(seats: int) -> None:
    spec = of(pipelines=2, elastic={"minPipelines": 2, "maxPipelines": 3}, standby={"workers": 1})
    assert wanted_workers(fitted(spec, seats)) == 1 + min(6, seats // 2 * 2)


@pytest.mark.parametrize("seats", [1, 2, 5, 8])
def test_a_chosen_grid_is_chosen_for_these(seats: int) -> None:
    spec = of(topology={}, elastic={"maxWorkers": 8})
    found = fitted(spec, seats)
    assert wanted_workers(found) == seats
    assert found.topology.stages * found.topology.pipelines <= seats


def test_with_all_of_them_it_is_the_job_itself() -> None:
    spec = of()
    assert fitted(spec, 4) is spec
