"""Misspelt fields of a worker's template: found by name, and nothing else is taken for one."""

import json
import runpy
from copy import deepcopy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.job.pod_templates import merge, unknown_fields, unknown_in_template
from bamboo_operator.manifests.template import outside_the_spec, refusal
from manifest_kit import minimal
from operator_kit import TEMPLATE, job, render

T = "spec.worker.template"
GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "core" / "generate.py"))


def test_the_names_are_those_of_kubernetes_schemas():
    assert GENERATOR["FILE"].read_text() == GENERATOR["text"](), "make docs"


def trainer(**fields):
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


@pytest.mark.parametrize(
    ("template", "problems"),
    [
        (TEMPLATE, []),
        ({key: render(template=TEMPLATE)[key] for key in ("metadata", "spec")}, []),
        (
            {"spec": {"tolerations": [{"operater": "Exists"}]}},
            [f"{T}.spec.tolerations[0].operater: unknown field, did you mean operator?"],
        ),
        (
            {"spec": {"toleratoins": [{"operater": "Exists"}]}},
            [f"{T}.spec.toleratoins: unknown field, did you mean tolerations?"],
        ),
        (
            {"spce": {}, "metadata": {"lables": {}}},
            [
                f"{T}.spce: unknown field, did you mean spec?",
                f"{T}.metadata.lables: unknown field, did you mean labels?",
            ],
        ),
        (
            trainer(env=[{"name": "A"}, {"name": "B", "valueFrom": {"secretKeyRef": {"nmae": "x"}}}]),
            [f"{T}.spec.containers[0].env[1].valueFrom.secretKeyRef.nmae: unknown field, did you mean name?"],
        ),
        (
            trainer(resources={"limits": {"whatever.dev/gpus": 1}, "limit": None}),
            [f"{T}.spec.containers[0].resources.limit: unknown field, did you mean limits?"],
        ),
        (
            {"spec": {"nodeSelector": {"any": "key"}, "affinity": {"nodeAffinity": {"zzzzzzzzzzzzzzzzzz": []}}}},
            [f"{T}.spec.affinity.nodeAffinity.zzzzzzzzzzzzzzzzzz: unknown field"],
        ),
        ({"metadata": {"annotations": {"a": "b"}, "labels": None}, "spec": None}, []),
        ({"spec": {"containers": ["no object", None, 3], "volumes": {"name": "x"}, "os": "linux"}}, []),
    ],
)
def test_unknown_fields_have_their_sentence(template, problems):
    before = deepcopy(template)
    assert list(map(str, unknown_fields(template))) == problems
    assert template == before


def test_validate_names_them_beside_other_mistakes(tmp_path):
    document = minimal()
    document["spec"] |= {"worker": {"template": {"spec": {"tolerations": [{"operater": "Exists"}]}}}, "suspend": "yes"}
    file = tmp_path / "job.json"
    file.write_text(json.dumps(document))
    found = CliRunner().invoke(app, ["validate", str(file)])
    assert found.exit_code == 2
    suspend, operator = found.output.splitlines()
    assert suspend.startswith(f"bamboo: {file}:1: spec.suspend: expected true or false")
    assert operator == f"bamboo: {file}:1: {T}.spec.tolerations[0].operater: unknown field, did you mean operator?"


def test_those_of_a_pools_template_are_named_by_their_pool():
    pools = [{"name": "a"}, {"name": "b", "template": {"spec": {"toleratoins": []}}}]
    (found,) = unknown_in_template(job(nodePools=pools))
    assert str(found) == "spec.nodePools[1].template.spec.toleratoins: unknown field, did you mean tolerations?"
    said = 'unknown field "spec.toleratoins"'
    assert refusal(pools[1]["template"], said, "spec.nodePools[1].template") == (str(found),)


def strict(*paths):
    """As an API server puts it."""
    unknown = ", ".join(f'unknown field "{path}"' for path in paths)
    return f'Pod in version "v1" cannot be handled as a Pod: strict decoding error: {unknown}'


def test_the_operator_names_them_as_they_stand_in_the_manifest():
    """The API server sees the pod, where lists are merged."""
    volumes = [{"name": "data", "emptyDri": {}}]
    template = {"sepc": {}, "spec": {"volumes": volumes, "newerThanWeKnow": True}}
    place = merge({"volumes": [{"name": "tmp"}]}, template["spec"])["volumes"].index(volumes[0])
    assert place == 1
    said = f"{T}.spec.volumes[0].emptyDri: unknown field, did you mean emptyDir?"
    assert refusal(template, strict(f"spec.volumes[{place}].emptyDri")) == (said,)
    assert outside_the_spec(job(worker={"template": template})) == (f"{T}.sepc: unknown field, did you mean spec?",)
    assert refusal({}, strict("spec.later")) == (f"{T}: unknown field spec.later of a pod",)
    assert refusal(template, "spec.x: Invalid value") == (f"{T}: spec.x: Invalid value",)
