"""What of a job may change after it was created, and what only while it is suspended."""

from typing import Any

import pytest

from bamboo_core.job.edits import apply_edit, apply_edit_to_manifest, refusal_message, refused_fields
from bamboo_core.job.manifest import parse_manifest
from crd_cases import SPEC, Edit, Path, good_changes, running, suspended, whole, whole_of_a_fixed_grid
from crd_kit import refusals
from manifest_kit import minimal

Document = dict[str, Any]
FREE = {
    "budget",
    "degradedPriorityClassName",
    "stragglerPolicy",
    *(
        "suspend",
        "elastic",
        "redundancy",
        "standby",
        "nodePools",
        "cleanPodPolicy",
        "ttlSecondsAfterFinished",
        "disruptionBudget",
    ),
    *("activeDeadlineSeconds", "progressDeadlineSeconds", "worker"),
}
WHILE_SUSPENDED = {"queue"}
FIXED = {"managedBy", "task", "training", "spread", "checkpoint", "failurePolicy"}


def may_change(path: Path) -> bool:
    if path[:2] == ("spec", "topology"):
        return path[2:] == ("schedule",)
    if path[:2] == ("spec", "elastic"):
        return len(path) > 2
    if path[:2] == ("spec", "redundancy"):
        return path[2:] == ("mode",)
    if path[:3] == ("spec", "worker", "devices"):
        return False
    return path[1] in FREE


def test_of_every_field_it_is_known_whether_it_may_change() -> None:
    assert {*FREE, *WHILE_SUSPENDED, *FIXED, "topology"} == SPEC["properties"].keys()


@pytest.mark.parametrize("field", SPEC["properties"])
def test_a_running_job_changes_only_where_it_may(field: str) -> None:
    assert good_changes(field)
    for old, edit, new in good_changes(field):
        assert (refusals(new, old) == []) == may_change(edit.path), edit
        assert (refusals(old, new) == []) == may_change(edit.path), f"back: {edit}"


@pytest.mark.parametrize("field", SPEC["properties"])
def test_what_a_running_job_does_not_take_over_is_named(field: str) -> None:
    """Where no rule of the CRD refuses it, as on a server without them; and the rest is taken over."""
    for old, edit, new in good_changes(field):
        before, after, names = parse_manifest(old), parse_manifest(new), ".".join(map(str, edit.path))
        named = refused_fields(before, after)
        if may_change(edit.path):
            assert named == (), edit
            assert apply_edit(before, after) == after, edit
        else:
            assert named or before == after, f"{edit}: nothing says that it changes something"
            for path in named:
                assert f"{names}.".startswith(f"{path}.") or f"{path}.".startswith(f"{names}."), (path, edit)
            assert apply_edit(before, after) == before, edit
        assert parse_manifest(apply_edit_to_manifest(old, new)) == apply_edit(before, after), edit


def test_a_refusal_names_ten_fields_at_most() -> None:
    assert refusal_message(("spec.task.config.a",)) == (
        "spec.task.config.a: is fixed while the job runs; the job keeps the original values"
    )
    assert refusal_message(tuple("abcdefghijkl")).startswith("a, b, c, d, e, f, g, h, i, j and 2 more: are fixed")


@pytest.mark.parametrize("field", sorted(WHILE_SUSPENDED))
def test_what_may_change_while_a_job_is_suspended(field: str) -> None:
    """Already suspended, or suspended by the same change, or started by it."""
    for old, edit, new in good_changes(field):
        suspended_old, suspended_new = (Edit(("spec", "suspend"), True, "").of(d) for d in (old, new))
        assert refusals(suspended_new, suspended_old) == [], edit
        assert refusals(new, suspended_old) == [], edit
        assert refusals(suspended_new, old) == [], edit
        assert refusals(new, old) == [f"spec.{field}: can change only while the job is suspended"], edit


@pytest.mark.parametrize("field", sorted(FIXED))
def test_a_suspended_job_keeps_the_rest(field: str) -> None:
    for old, edit, new in good_changes(field):
        suspended = [Edit(("spec", "suspend"), True, "").of(document) for document in (old, new)]
        assert refusals(suspended[1], suspended[0]), edit


@pytest.mark.parametrize(
    ("path", "value", "refusal"),
    [
        ("managedBy", "a/b", "spec.managedBy: cannot change; create a new job instead"),
        ("task.config", {"a": 1}, "spec.task: cannot change; create a new job instead"),
        ("training.seed", 1, "spec.training: cannot change; create a new job instead"),
        ("topology.stages", 3, "spec.topology.stages: cannot change; create a new job instead"),
        ("topology.lookahead", 0, "spec.topology.lookahead: cannot change; create a new job instead"),
        ("topology.flowsPerLink", 1, "spec.topology.flowsPerLink: can change only while the job is suspended"),
        ("topology.split", [1, 1], "spec.topology.split: cannot change; create a new job instead"),
        ("worker.devices", 2, "spec.worker.devices: can change only while the job is suspended"),
        ("spread.policy", "None", "spec.spread: cannot change; create a new job instead"),
        ("checkpoint", {"storage": {"uri": "s3://b"}}, "spec.checkpoint: cannot change; create a new job instead"),
        ("failurePolicy.backoffLimit", 0, "spec.failurePolicy: cannot change; create a new job instead"),
        (
            "redundancy.placement",
            "Host",
            "spec.redundancy: can change only while the job is suspended, except mode and replicas",
        ),
        ("queue", {"name": "q"}, "spec.queue: can change only while the job is suspended"),
    ],
)
def test_a_field_that_was_absent_may_not_come_up(path: str, value: Any, refusal: str) -> None:
    new = minimal()
    at = new["spec"]
    *parents, last = path.split(".")
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    assert refusals(new) == []
    assert refusals(new, minimal()) == [refusal]
    assert refusals(minimal(), new) == [refusal]


def test_a_change_without_effect_is_no_change() -> None:
    spelled_out = minimal()
    spelled_out["spec"] |= {"managedBy": "bamboo.dev/operator", "spread": {}, "queue": None, "suspend": False}
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
