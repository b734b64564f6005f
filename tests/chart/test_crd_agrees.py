"""Agreement of parser and CRD: both accept the same manifests."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.yaml_file import load_document
from crd_cases import KEPT, RULES, Path, changed, manifests, put, whole, whole_with_url
from crd_kit import ABSENT, ROOT, defaulted, nodes, parsed, refusals
from manifest_kit import minimal

Document = dict[str, Any]
VALID = {
    "minimal": minimal(),
    "whole": whole(),
    "whole with a URL": whole_with_url(),
    **{path.name: load_document(str(path)) for path in sorted((ROOT / "examples").glob("*.yaml"))},
}


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_a_good_manifest_is_good_for_both(document: Document) -> None:
    assert refusals(document) == []
    assert parsed(document) is not None


@pytest.mark.parametrize("document", VALID.values(), ids=VALID)
def test_defaults_mean_what_their_absence_means(document: Document) -> None:
    assert parse_manifest(defaulted(document)) == parse_manifest(document)


@pytest.mark.parametrize(("changes", "message"), RULES, ids=str)
def test_both_refuse_what_breaks_a_rule_between_fields(changes: dict[str, Any], message: str) -> None:
    document = changed(changes)
    assert [refusal for refusal in refusals(document) if refusal.startswith(message)]
    assert parsed(document) is None


def test_every_rule_between_fields_is_broken_once() -> None:
    broken = {re.sub(r"\.\d+(?=\.)", "[]", refusal) for changes, _ in RULES for refusal in refusals(changed(changes))}
    for path, node in nodes():
        for rule in node.get("x-kubernetes-validations", ()):
            if "oldSelf" not in rule["rule"] and "self.matches(" not in rule["rule"]:  # the last test edits texts
                assert f"{path}{rule.get('fieldPath', '')}: {rule['message']}" in broken


@pytest.mark.parametrize("changes", KEPT, ids=str)
def test_both_take_what_just_keeps_a_rule(changes: dict[str, Any]) -> None:
    assert refusals(changed(changes)) == []
    assert parsed(changed(changes)) is not None


@given(manifests())
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_any_good_manifest_is_good_for_both_with_and_without_defaults(document: Document) -> None:
    assert refusals(document) == []
    assert parse_manifest(defaulted(document)) == parse_manifest(document)
    assert yaml.safe_load(yaml.safe_dump(document)) == document


def places(value: Any, path: Path) -> list[Path]:
    """Return the paths of a value and of all values in it, outer paths first. path: the value's own."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, held in inner for place in places(held, (*path, name)))]


WRONG = st.sampled_from(
    [ABSENT, None, True, 7, -1, 0, 2**63, 1.5, "", "x", "a b", "X\n", [], {}, [None], {"unknown": 1}]
)


@given(manifests(), WRONG, st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_both_judge_any_manifest_with_one_change_alike(document: Document, value: Any, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from([place for place in places(document, ()) if place and place[-1] != "config"]))
    edited = put(document, place, value)
    assert (parsed(edited) is None) == bool(refusals(edited)), refusals(edited)
