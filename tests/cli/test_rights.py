"""The rights that a diagnosis asks for are those that the operator's role grants."""

from pathlib import Path

import yaml

from bamboo.remote.diagnosis.rights import OPERATOR

RULES = Path(__file__).parents[2] / "operator" / "rbac.yaml"


def test_the_operator_is_asked_about_what_its_role_grants() -> None:
    (role,) = (one for one in yaml.safe_load_all(RULES.read_text()) if one["kind"] == "ClusterRole")
    granted = {
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {(right.verb, right.group, right.resource) for right in OPERATOR} == granted
