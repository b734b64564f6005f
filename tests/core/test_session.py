"""What `bamboo run --verify` compares a run with."""

from typing import Any

import pytest
import yaml

from bamboo.job.manifest import parse_manifest
from bamboo.job.spec import RedundancyMode
from bamboo.local.session import undisturbed_job
from bamboo.local.views.summary import compare
from manifest_kit import WHOLE


@pytest.mark.parametrize(
    ("topology", "reproducible", "grid", "split"),
    [
        ({"stages": 4, "pipelines": 2, "split": [3, 4, 4, 2]}, True, (4, 1), (3, 4, 4, 2)),
        ({"stages": 4, "pipelines": 3}, True, (4, 2), None),
        ({"stages": 4, "split": [3, 4, 4, 2]}, True, (3, 1), None),
        ({"stages": 1}, True, (1, 1), None),
        ({"stages": 4, "pipelines": 2}, False, (4, 2), None),
    ],
)
def test_a_run_is_compared_with_one_on_another_grid(
    topology: dict[str, Any], reproducible: bool, grid: tuple[int, int], split: tuple[int, ...] | None
) -> None:
    manifest = yaml.safe_load(WHOLE)
    manifest["spec"] |= {"topology": topology, "elastic": {"minPipelines": 1}}
    manifest["spec"]["training"] |= {"reproducible": reproducible, "gradientGroups": 16 if reproducible else None}
    given = yaml.safe_dump(manifest)
    job = parse_manifest(manifest)
    spec, changed = undisturbed_job(job, manifest)
    assert ((spec.topology.stages, spec.topology.pipelines), spec.topology.split) == (grid, split)
    assert spec == parse_manifest(changed)
    assert (spec.training, spec.task) == (job.training, job.task), "it stops early where the job does"
    assert spec.redundancy.mode is RedundancyMode.NONE
    assert (spec.elastic.min_pipelines, spec.elastic.max_pipelines, spec.standby.workers) == (grid[1], grid[1], 0)
    assert yaml.safe_dump(manifest) == given


def test_states_are_compared_however_they_are_divided() -> None:
    one, two, three = (f"{n:064x}" for n in (5, 7, 12))
    assert compare([one, two], [three])
    assert not compare([one, two], [one])
    assert not compare([], [])
    assert not compare([one], [])
