"""The merged trace of all workers."""

import json
from pathlib import Path

from bamboo.local.trace_files import merge_traces


def test_traces_are_merged_without_the_torn_line(tmp_path: Path) -> None:
    (tmp_path / "w0.json").write_text('[\n{"name": "a"},\n{"name": "b"},\n{"na')
    (tmp_path / "w1.json").write_text('[\n{"name": "c"}\n]\n')
    target = tmp_path / "out" / "trace"
    target.parent.mkdir()
    merge_traces(tmp_path, target)
    assert [e["name"] for e in json.loads(target.read_text())["traceEvents"]] == ["a", "b", "c"]
