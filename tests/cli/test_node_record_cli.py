"""`bamboo traces fetch`, as it is typed: the operator's record of nodes from its ConfigMap."""

import base64
from pathlib import Path
from typing import Any

import pytest

from bamboo_core.traces.compressed import compressed
from bamboo_core.traces.json_lines import to_json_lines
from bamboo_core.traces.trace import Change, NodeChange, make_trace
from remote_command_kit import type_in
from remote_kit import Asked, Json

TRACE = make_trace([NodeChange(at=1.0, change=Change.ADD, node="n0", zone="a", pool="spot")], duration=60.0)


def record(name: str, data: bytes = compressed(TRACE)) -> Json:
    return {"metadata": {"name": name}, "binaryData": {"trace.jsonl.gz": base64.b64encode(data).decode()}}


def fetched(folder: Path, kept: list[Json], *flags: str) -> tuple[int, str, str, list[Asked]]:
    def answer(asked: Asked) -> tuple[int, Any]:
        assert asked.query["labelSelector"] == "bamboo.dev/node-record=true"
        return 200, {"items": kept}

    return type_in(folder, answer, "traces", "fetch", *flags)  # type: ignore[arg-type]


def test_the_record_is_written_as_a_trace(tmp_path: Path) -> None:
    code, said, _, asked = fetched(tmp_path, [record("bamboo-operator-nodes")])
    assert (code, said) == (0, "".join(to_json_lines(TRACE)))
    assert [one.path for one in asked] == ["/api/v1/namespaces/bamboo-system/configmaps"]
    file = tmp_path / "ours.jsonl"
    code, said, _, asked = fetched(tmp_path, [record("x")], "--namespace", "ops", "--output", str(file))
    assert (code, said, file.read_text()) == (0, "", "".join(to_json_lines(TRACE)))
    assert asked[0].path == "/api/v1/namespaces/ops/configmaps"


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ([], "namespace bamboo-system has no record of nodes"),
        ([record("a"), record("b")], "namespace bamboo-system has 2 records of nodes (a, b); expected one"),
        ([record("a", b"no gzip")], "ConfigMap bamboo-system/a: the record of nodes cannot be read"),
        ([record("a", compressed(TRACE)[:-9])], "ConfigMap bamboo-system/a: the record of nodes is cut off"),
        ([{"metadata": {"name": "a"}}], "ConfigMap bamboo-system/a: the record of nodes"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, kept: list[Json], told: str) -> None:
    code, said, complained, _ = fetched(tmp_path, kept)
    assert (code, said) == (1, "")
    assert told in complained


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    code, _, complained, _ = fetched(tmp_path, [record("a")], "-o", str(tmp_path / "no" / "such"))
    assert code == 1
    assert "cannot write" in complained
