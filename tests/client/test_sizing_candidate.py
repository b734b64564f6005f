"""The edits that turn a job's manifest into the manifest of a candidate plan."""

from dataclasses import replace
from typing import Any

import pytest

from bamboo.sizing.trials.candidate import Candidate, as_the_job_is, edited, edits, job_of
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import RedundancyMode
from job_simulation_kit import manifest


def changes(document: dict[str, Any], **fields: Any) -> dict[Any, Any]:
    spec = parse_manifest(document)
    return edits(replace(as_the_job_is("m", spec), **fields), spec)


def test_the_job_as_it_is_needs_no_edit() -> None:
    assert changes(manifest(2, 1, 6)) == changes(manifest(3, 2, 8)) == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stages": 3}, {("topology", "stages"): 3}),
        ({"mode": RedundancyMode.NONE}, {("redundancy", "mode"): "None"}),
        ({"standby": 2}, {("standby", "workers"): 2}),
        ({"micro_batch": 8}, {("training", "microBatchSize"): 8}),
        ({"spread": SpreadPolicy.SINGLE_ZONE}, {("spread", "policy"): "SingleZone"}),
        ({"pipelines": 2}, {("topology", "pipelines"): 2}),
    ],
)
def test_each_field_of_a_plan_is_one_of_the_manifest(fields: Any, expected: Any) -> None:
    assert changes(manifest(2, 1, 6), **fields) == {("spec", *path): value for path, value in expected.items()}


@pytest.mark.parametrize(
    ("stages", "pipelines", "elastic", "expected"),
    [
        (None, None, {"maxWorkers": 4}, {"maxWorkers": 8}),
        (4, None, {"maxWorkers": 4}, {"maxWorkers": 8}),
        (None, 2, {"maxWorkers": 4, "minWorkers": 3}, {"maxWorkers": 8}),
        (4, None, {"maxWorkers": 99, "minWorkers": 12}, {"maxWorkers": 8, "minWorkers": 8}),
    ],
)
def test_where_the_grid_is_chosen_the_most_workers_are_those_of_the_plans_grid(
    stages: int | None, pipelines: int | None, elastic: dict[str, int], expected: dict[str, int]
) -> None:
    document = manifest(stages, pipelines, 8, elastic=elastic)
    found = changes(document, stages=4, pipelines=2)
    assert found == {("spec", "elastic", name): value for name, value in expected.items()}
    parse_manifest(edited(document, found))


def test_edits_make_what_is_missing_and_leave_the_rest() -> None:
    document = {"spec": {"redundancy": None, "kept": 1}}
    made = edited(document, {("spec", "redundancy", "mode"): "None", ("spec", "standby", "workers"): 2})
    assert made == {"spec": {"redundancy": {"mode": "None"}, "standby": {"workers": 2}, "kept": 1}}
    assert document == {"spec": {"redundancy": None, "kept": 1}}


def test_what_the_rules_forbid_is_no_job() -> None:
    document = manifest(2, 1, 6)
    spec = parse_manifest(document)
    one = as_the_job_is("m", spec)
    assert isinstance(one, Candidate)
    made = job_of(replace(one, stages=3), spec, document)
    assert made is not None
    assert made[0] == parse_manifest(made[1])
    assert job_of(replace(one, micro_batch=5), spec, document) is None
