"""Fields that are misspelt or at the wrong level: the likely cause first, what was meant, and in which line."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.job import manifest
from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.yaml_file import read_manifest_source
from crd_kit import CRD
from manifest_kit import MINIMAL

ELASTIC = "unknown field, did you mean spec.elastic?"


def problems(**spec: Any) -> list[str]:
    """Of the minimal job with these fields; None takes one away."""
    document = yaml.safe_load(MINIMAL)
    document["spec"] = {key: value for key, value in {**document["spec"], **spec}.items() if value is not None}
    with pytest.raises(ManifestError) as caught:
        parse_manifest(document)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"topology": {"stages": 2, "elastic": {}}}, [f"spec.topology.elastic: {ELASTIC}"]),
        ({"steps": 3}, ["spec.steps: unknown field, did you mean spec.training.steps?"]),
        ({"name": "x"}, ["spec.name: unknown field, did you mean metadata.name?"]),
        ({"workers": 1}, ["spec.workers: unknown field, did you mean worker or spec.standby.workers?"]),
        ({"xyz": 1}, ["spec.xyz: unknown field"]),
        # what is missing only because it is misspelt is not told once more
        ({"training": None, "trainning": {}}, ["spec.trainning: unknown field, did you mean training?"]),
        (
            {"training": {"stepps": 3, "globalBatchSize": 4, "microBatchSize": 2}},
            ["spec.training.stepps: unknown field, did you mean steps?"],
        ),
        ({"topology": {"stage": 2}}, ["spec.topology.stage: unknown field, did you mean stages?"]),
        ({"budget": {"doneby": "2h"}}, ["spec.budget.doneby: unknown field, did you mean doneBy?"]),
        # a cause comes before what is wrong anyway
        (
            {"training": {"steps": 0, "globalBatchsize": 4, "microBatchSize": 2}},
            [
                "spec.training.globalBatchsize: unknown field, did you mean globalBatchSize?",
                "spec.training.steps: expected an integer >= 1, got 0",
            ],
        ),
    ],
)
def test_the_likely_cause_comes_first(spec: dict[str, Any], said: list[str]) -> None:
    assert problems(**spec) == said


def test_what_is_missing_from_an_object_that_is_there_is_told() -> None:
    told = problems(training={"steps": 3}, trainning={})
    assert told[0] == "spec.trainning: unknown field, did you mean training?"
    assert len([line for line in told if line.startswith("spec.training.")]) == 2


def test_every_field_outside_of_lists_has_its_place() -> None:
    def fields(schema: dict[str, Any], above: str) -> Iterator[tuple[str, str]]:
        for name, inner in schema.get("properties", {}).items():
            yield name, f"{above}.{name}"
            if "additionalProperties" not in inner and not inner.get("x-kubernetes-preserve-unknown-fields"):
                yield from fields(inner, f"{above}.{name}")

    version = CRD["spec"]["versions"][0]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    missing = [path for name, path in fields(spec, "spec") if path not in manifest.fields_by_name().get(name, ())]
    assert missing == []


def test_problems_have_their_lines_also_where_something_is_missing(tmp_path: Any) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "apiVersion: bamboo.dev/v1alpha1\n"  # 1
        "kind: BambooJob\n"
        "metadata: {name: small}\n"  # 3
        "spec:\n"
        "  task:\n"  # 5
        '    entrypoint: "a:b"\n'
        "  training:\n"  # 7
        "    globalBatchSize: 4\n"
        "    microBatchSize: many\n"  # 9
        "  topology: {stages: 2,\n"
        "    elastic: {}}\n"  # 11
        "  nodePools:\n"
        "  - name: a\n"  # 13
        "  - name: b\n"
        "    capacity: Free\n"  # 15
    )
    result = CliRunner().invoke(app, ["validate", str(job)])
    assert result.exit_code == 2
    found = [re.match(r"bamboo: (.*):(\d+): (\S+): ", line) for line in result.output.splitlines()]
    assert all(match and match[1] == str(job) for match in found), result.output
    assert [(int(match[2]), match[3]) for match in found if match] == [
        (11, "spec.topology.elastic"),
        (9, "spec.training.microBatchSize"),
        (15, "spec.nodePools[1].capacity"),
        (7, "spec.training"),
    ]


def test_lines_of_a_file_that_refers_to_itself_are_bounded(tmp_path: Any) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("a: &a [*a, *a]\n" + "".join(f"b{n}: 1\n" for n in range(100)))
    assert read_manifest_source(str(job)).lines["a"] == 1


def test_several_files_and_standard_input_are_checked(tmp_path: Any) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(MINIMAL)
    bad.write_text(MINIMAL.replace("steps", "stepps"))
    result = CliRunner().invoke(app, ["validate", str(bad), str(good), "-"], input=MINIMAL)
    assert result.exit_code == 2
    assert f"bamboo: {bad}:" in result.output
    assert result.output.count("is valid") == 2
    nothing = CliRunner().invoke(app, ["validate", "-"], input="")
    assert (nothing.exit_code, nothing.output) == (2, "bamboo: standard input: the file is empty\n")
