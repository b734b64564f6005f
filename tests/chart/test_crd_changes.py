"""Edits of a BambooJob: fields that may change, some of them only while the job is suspended."""

from typing import Any

import pytest

from bamboo_core.job.edits import apply_edit_to_manifest, refused_fields
from bamboo_core.job.manifest import parse_manifest
from crd_cases import EDITS, SUSPENDED, put, running, suspended, whole, whole_of_a_fixed_grid
from crd_kit import refusals
from manifest_kit import minimal


@pytest.mark.parametrize(("path", "value", "refusal"), EDITS)
def test_a_running_job_changes_only_where_it_may(path: str, value: Any, refusal: str) -> None:
    """The CRD's rules and `edits` judge alike, whether a field is set or removed."""
    old, new = minimal(), put(minimal(), ("spec", *path.split(".")), value)
    assert refusals(new) == []
    assert refusals(new, old) == refusals(old, new) == ([refusal] if refusal else [])
    before, after = parse_manifest(old), parse_manifest(new)
    followed = parse_manifest(apply_edit_to_manifest(old, new))
    assert followed == (before if refusal else after)
    assert bool(refused_fields(followed, after)) == bool(refusal)


@pytest.mark.parametrize(("path", "value", "refusal"), [edit for edit in EDITS if edit[2]])
def test_a_suspended_job_keeps_what_needs_a_new_job(path: str, value: Any, refusal: str) -> None:
    """The refusals are the same whether the job stays suspended, or the edit suspends or resumes it."""
    old, new = minimal(), put(minimal(), ("spec", *path.split(".")), value)
    expected = [] if SUSPENDED in refusal else [refusal]
    assert refusals(suspended(new), suspended(old)) == expected
    assert refusals(new, suspended(old)) == refusals(suspended(new), old) == expected


def test_a_change_without_effect_is_no_change() -> None:
    spelled_out = minimal()
    spelled_out["spec"] |= {"spread": {}, "queue": None, "suspend": False}
    assert refusals(spelled_out, minimal()) == []
    assert refusals(minimal(), spelled_out) == []


def test_a_grid_is_opened_or_fixed_only_while_the_job_is_suspended() -> None:
    chosen, fixed = whole(), whole_of_a_fixed_grid()
    for old, new in ((chosen, fixed), (fixed, chosen)):
        assert refusals(running(new), running(old)) == [
            "spec.topology.pipelines: can change only while the job is suspended",
            "spec.elastic: can come or go only while the job is suspended",
        ]
        assert refusals(suspended(new), suspended(old)) == []
