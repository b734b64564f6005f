"""What the parser takes the API server takes, and the other way round."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.yaml_file import load_document
from crd_cases import (
    KEPT,
    RULES,
    SPEC,
    Edit,
    changed,
    edits,
    manifests,
    whole,
    whole_with_uri,
    wholes,
)
from crd_kit import ABSENT, ROOT, SCHEMA, broken_rules, defaulted, nodes, parsed, refusals
from manifest_kit import minimal

Document = dict[str, Any]
VALID = {
    "minimal": minimal(),
    "whole": whole(),
    "whole with uri": whole_with_uri(),
    **{path.name: load_document(str(path)) for path in sorted((ROOT / "examples").glob("*.yaml"))},
}


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_a_good_manifest_is_good_for_both(document: Document) -> None:
    assert refusals(document) == []
    assert parsed(document) is not None


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_defaults_mean_what_their_absence_means(document: Document) -> None:
    assert parse_manifest(defaulted(document)) == parse_manifest(document)


def disagreement(document: Document, refused: bool) -> str:
    """Empty if both say the same, and refuse what is wrong for sure."""
    server, parser = refusals(document), parsed(document)
    if bool(server) != (parser is None):
        return f"the CRD says {server or 'yes'}, the parser {'yes' if parser else 'no'}"
    return "both take it" if refused and not server else ""


@pytest.mark.parametrize("field", SPEC["properties"])
def test_both_judge_every_change_of_a_field_alike(field: str) -> None:
    for document in wholes(field):
        all_edits = list(edits(SPEC["properties"][field], document["spec"][field], ("spec", field)))
        assert len(all_edits) > 3
        found = [(edit, disagreement(edit.of(document), edit.refused)) for edit in all_edits]
        assert [(str(edit), edit.value, what) for edit, what in found if what] == []


@pytest.mark.parametrize(
    "edit",
    [
        *edits(SCHEMA["properties"]["metadata"]["properties"]["name"], "whole", ("metadata", "name")),
        Edit(("metadata", "name"), ABSENT, "no name"),
        *(Edit((name,), ABSENT, "absent") for name in ("apiVersion", "kind", "metadata", "spec")),
        *(Edit((name,), wrong, "wrong") for name in ("apiVersion", "kind", "spec") for wrong in ("v1", 3, None)),
        *(Edit(("spec", name), ABSENT, "absent") for name in SPEC["required"]),
        *(Edit(path, 1, "unknown field") for path in (("unknown",), ("metadata", "unknown"), ("spec", "unknown"))),
    ],
    ids=str,
)
def test_both_judge_every_change_of_the_frame_alike(edit: Edit) -> None:
    assert disagreement(edit.of(whole()), edit.refused) == ""


@pytest.mark.parametrize(("changes", "message"), RULES, ids=str)
def test_both_refuse_what_breaks_a_rule_between_fields(changes: dict[str, Any], message: str) -> None:
    document = changed(changes)
    assert [refusal for refusal in refusals(document) if refusal.startswith(message)]
    assert parsed(document) is None


def test_every_rule_between_fields_is_broken_once() -> None:
    broken = {re.sub(r"\.\d+(?=\.)", "[]", refusal) for changes, _ in RULES for refusal in refusals(changed(changes))}
    for path, node in nodes():
        for rule in node.get("x-kubernetes-validations", ()):
            if "oldSelf" not in rule["rule"]:
                assert f"{path}{rule.get('fieldPath', '')}: {rule['message']}" in broken


@pytest.mark.parametrize("changes", KEPT, ids=str)
def test_both_take_what_just_keeps_a_rule(changes: dict[str, Any]) -> None:
    assert disagreement(changed(changes), False) == ""
    assert parsed(changed(changes)) is not None


@given(manifests())
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_any_good_manifest_is_good_for_both_with_and_without_defaults(document: Document) -> None:
    assert refusals(document) == []
    assert parse_manifest(defaulted(document)) == parse_manifest(document)
    assert yaml.safe_load(yaml.safe_dump(document)) == document


@given(manifests(), st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_both_judge_any_manifest_with_one_change_alike(document: Document, data: st.DataObject) -> None:
    spec = {name: value for name, value in document["spec"].items() if value not in (None, [], {})}
    field = data.draw(st.sampled_from(sorted(spec)))
    all_edits = edits(SPEC["properties"][field], spec[field], ("spec", field))
    edit = data.draw(st.sampled_from([edit for edit in all_edits if edit.small]))
    assert disagreement(edit.of(document), edit.refused) == ""


NUMBERS = [e for e in edits(SPEC, whole()["spec"], ("spec",)) if e.refused and type(e.value) is int]
OUT_OF_BOUNDS = [edit for edit in NUMBERS if "instead of" not in edit.why]  # rules see values of the right type only


@pytest.mark.parametrize("edit", OUT_OF_BOUNDS, ids=str)
def test_a_number_out_of_its_bounds_is_refused_for_that_and_no_rule_fails_to_be_judged(edit: Edit) -> None:
    """A server judges the rules all the same, and would tell the user of a division by zero, too."""
    document = edit.of(whole())
    assert refusals(document)
    for rule in broken_rules(document):
        assert "expected" in rule or "cannot" in rule
