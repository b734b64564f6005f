"""The second run of `bamboo run --verify`: its job, and the comparison of the runs' states."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from bamboo.local.session import undisturbed_job
from bamboo.local.views.summary import Summary, compare
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import RedundancyMode
from manifest_kit import WHOLE, bamboojob, training
from run_view_kit import STATUS, ran, source


def _ran(stages: int, pipelines: int, *, lacks_room: bool = False) -> Summary:
    """Return the summary of a job that completed on this grid. lacks_room: workers had no memory for some replicas."""
    grid = tuple(tuple((f"w{d}-{s}", True) for s in range(stages)) for d in range(pipelines))
    return ran(replace(STATUS, grid=grid, lacks_room=lacks_room))


@pytest.mark.parametrize(
    ("topology", "grid", "split"),
    [
        ({"stages": 4, "pipelines": 2, "split": [3, 4, 4, 2]}, (4, 1), (3, 4, 4, 2)),
        ({"stages": 4, "pipelines": 3}, (4, 2), None),
        ({"stages": 4, "split": [3, 4, 4, 2]}, (3, 1), None),
        ({"stages": 1}, (1, 1), None),
    ],
)
def test_a_run_is_compared_with_one_on_another_grid(
    topology: dict[str, Any], grid: tuple[int, int], split: tuple[int, ...] | None
) -> None:
    manifest = yaml.safe_load(WHOLE)
    manifest["spec"] |= {"topology": topology, "elastic": None}
    given = yaml.safe_dump(manifest)
    job = parse_manifest(manifest)
    again = undisturbed_job(source(manifest), _ran(7, 7))
    spec = again.spec
    assert ((spec.topology.stages, spec.topology.pipelines), spec.topology.split) == (grid, split)
    assert spec == parse_manifest(again.document)
    assert (spec.training, spec.task) == (job.training, job.task), "it stops early where the job does"
    assert spec.redundancy.mode is RedundancyMode.NONE
    assert (spec.elastic, spec.standby.workers) == (None, 0)
    assert yaml.safe_dump(manifest) == given


@pytest.mark.parametrize(
    ("ran", "lacks_room", "grid"),
    [
        ((2, 2), False, (2, 1)),
        ((4, 1), False, (3, 1)),
        ((1, 4), True, (1, 3)),
        ((4, 1), True, (4, 1)),
        ((1, 1), False, (1, 1)),
    ],
)
@pytest.mark.parametrize("topology", [{}, {"stages": 1}, {"pipelines": 1}])
def test_a_chosen_grid_is_compared_with_one_that_needs_no_more_memory(
    ran: tuple[int, int], lacks_room: bool, grid: tuple[int, int], topology: dict[str, int]
) -> None:
    manifest = bamboojob(
        task={"entrypoint": "m:build"},
        training=training(3, 8, 2),
        elastic={"maxWorkers": 4, "objective": "Value"},
        nodePools=[{"name": "s", "pricePerHour": "1"}],
        budget={"money": "7", "doneBy": "2030-01-01T00:00:00Z"},
        topology=topology,
    )
    spec = undisturbed_job(source(manifest), _ran(*ran, lacks_room=lacks_room)).spec
    assert (spec.topology.stages, spec.topology.pipelines) == grid
    assert (spec.elastic, spec.budget) == (None, None)


def test_states_are_compared_however_they_are_divided() -> None:
    one, two, three = (f"{n:064x}" for n in (5, 7, 12))
    assert compare([one, two], [three])
    assert not compare([one, two], [one])
    assert not compare([], [])
    assert not compare([one], [])
