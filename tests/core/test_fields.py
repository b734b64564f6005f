"""Problems of a manifest's fields: suggestions for unknown fields, line numbers, and several files at once."""

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.job.yaml_file import read_manifest_source
from manifest_kit import MINIMAL, minimal, problems

ELASTIC = "unknown field, did you mean spec.elastic?"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"topology": {"stages": 2, "elastic": {}}}, [f"spec.topology.elastic: {ELASTIC}"]),
        ({"steps": 3}, ["spec.steps: unknown field, did you mean spec.training.steps?"]),
        ({"workers": 1}, ["spec.workers: unknown field, did you mean worker or spec.standby.workers?"]),
        (
            {"training": None, "trainning": {}},
            [
                "spec.trainning: unknown field, did you mean training?",
                "spec.training.globalBatchSize: required, expected an integer >= 1",
                "spec.training.microBatchSize: required, expected an integer >= 1",
                "spec.training: expected exactly one of steps, epochs and tokens",
            ],
        ),
        (
            {"budget": {"money": "1", "doneby": "2h"}},
            [
                "spec.budget.doneby: unknown field, did you mean doneBy?",
                "spec.budget: expected only doneBy without a pricePerHour in each of spec.nodePools",
            ],
        ),
        (
            {"training": {"steps": 0, "globalBatchsize": 4, "microBatchSize": 2}},
            [
                "spec.training.globalBatchsize: unknown field, did you mean globalBatchSize?",
                "spec.training.steps: expected an integer >= 1, got 0",
                "spec.training.globalBatchSize: required, expected an integer >= 1",
            ],
        ),
    ],
)
def test_unknown_fields_come_first_with_what_was_probably_meant(spec: dict[str, Any], message: list[str]) -> None:
    document = minimal()
    document["spec"] = {key: value for key, value in {**document["spec"], **spec}.items() if value is not None}
    assert problems(document) == message


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
        (9, "spec.training.microBatchSize"),
        (11, "spec.topology.elastic"),
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
