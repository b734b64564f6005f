"""The CRD by itself: its validity in all supported versions of Kubernetes, its size, columns, status and rules."""

import json
import re
from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import ValidationError

from bamboo_operator.status.condition_rules import RULES as CONDITIONS
from crd_kit import CRD, STATUS_VALIDATOR, VERSION, compiled, defaulted, nodes

NODES = dict(nodes())
CORE_CEL = {
    *("_==_", "_!=_", "_<=_", "_>=_", "_&&_", "_||_", "!_", "_*_", "_/_", "_%_", "_+_", "_-_", "_?_:_"),
    *("_[_]", "size", "matches", "endsWith", "string", "@not_strictly_false"),
}


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(29, 38)])
def test_kubernetes_takes_it(version: str) -> None:
    assert kubernetes_validate.validate(CRD, version, strict=True) == version


def test_it_fits_into_an_annotation_of_kubectl_apply() -> None:
    """The CRD as JSON fills less than half of the size that Kubernetes allows for annotations."""
    assert len(json.dumps(CRD, separators=(",", ":"))) < 262_144 / 2


def test_a_server_refuses_what_a_spec_says_with_a_sentence() -> None:
    """The schema has no anyOf, and the spec has `pattern` only for quantities; rules with messages check other texts.

    An API server's message about a pattern shows only the pattern; about anyOf, only that no schema fits. Quantities
    have no rule: the server ignores their maximum length, and would refuse the CRD because such a rule costs too much.
    """
    for path, node in NODES.items():
        assert "anyOf" not in node, path
        if path.startswith("spec"):
            assert ("pattern" in node) == ("x-kubernetes-int-or-string" in node), path


def json_path(path: str) -> Mapping[str, Any]:
    """Return the schema at a column's path. Fails if a filter names an unknown condition."""
    for condition in re.findall(r'\[\?\(@\.type=="(\w+)"\)\]', path):
        assert condition in CONDITIONS
    return NODES[re.sub(r"\[\?.*?\)\]", "[]", path).removeprefix(".")]


def test_columns_show_what_is_there() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        if column["jsonPath"] != ".metadata.creationTimestamp":
            assert json_path(column["jsonPath"]).get("type", "string") == column["type"]
    columns = VERSION["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if not column.get("priority")]
    assert shown == ["State", "Stages", "Pipelines", "Ready", "Protected", "Step", "Preemptions", "Takeovers", "Age"]
    assert [c["name"] for c in columns if c.get("priority") == 1] == ["Samples/s", "Loss", "Cost"]


def test_the_status_is_written_apart_from_the_spec() -> None:
    assert VERSION["subresources"] == {"status": {}}


def test_a_status_has_no_other_fields_and_is_no_part_of_what_a_user_writes() -> None:
    with pytest.raises(ValidationError, match="unknown"):
        STATUS_VALIDATOR.validate({"unknown": 1})
    assert "status" not in defaulted({"spec": {}, "status": {}})


def rules() -> list[tuple[str, Mapping[str, Any]]]:
    return [(path, rule) for path, node in NODES.items() for rule in node.get("x-kubernetes-validations", ())]


@pytest.mark.parametrize(("path", "rule"), rules(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_rule_is_core_cel_and_says_what_was_expected(path: str, rule: Mapping[str, Any]) -> None:
    assert rule.keys() <= {"rule", "message", "fieldPath"}
    assert re.match("expected|cannot change|can (change|come or go) only", rule["message"])
    program = compiled(rule["rule"])
    assert set(program.functions()) <= CORE_CEL
    assert set(program.variables()) <= {"self", "oldSelf", "n", "@result"}
    assert path + rule.get("fieldPath", "") in NODES
