"""A manifest with other values, and its comments as they were."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo.sizing.edited_text import edited_text
from bamboo.sizing.trials.candidate import edited
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.job.yaml_file import source_of

PATHS = {
    ("spec", "topology", "stages"): st.integers(1, 9),
    ("spec", "topology", "pipelines"): st.integers(1, 9),
    ("spec", "training", "microBatchSize"): st.sampled_from([1, 2, 4]),
    ("spec", "redundancy", "mode"): st.sampled_from([mode.value for mode in RedundancyMode]),
    ("spec", "standby", "workers"): st.integers(0, 9),
    ("spec", "elastic", "minPipelines"): st.integers(1, 9),
    ("spec", "spread", "policy"): st.sampled_from(["Interleave", "SingleZone"]),
}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@settings(deadline=None)
@given(st.sampled_from(EXAMPLES), st.fixed_dictionaries({}, optional=PATHS))
def test_a_manifest_keeps_its_comments_and_all_other_fields(path: Path, changes: dict[Any, Any]) -> None:
    text = path.read_text()
    found = edited_text(text, changes)
    assert found is not None
    assert source_of("", found).document == edited(source_of("", text).document, changes)
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    assert [line.partition("#")[2] for line in found.splitlines() if "#" in line] == comments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: {b: 1} # x\n", "a: {b: 1, c: 7} # x\n"),
        ("a:\n  b: 1 # x\n", "a:\n  b: 1 # x\n  c: 7\n"),
        ("a:\n  b: 1", "a:\n  b: 1\n  c: 7\n"),
        ("a:\n  c: 'old' # x\n  b: 1\n", "a:\n  c: 7 # x\n  b: 1\n"),
        ("z: 1\n", "z: 1\na: {c: 7}\n"),
        ('{"a": {"c": 1}}', '{"a": {"c": 7}}'),
        ("a:\n- b: 1\n", None),
        ("a:\n", None),
    ],
)
def test_a_value_is_put_in_its_place(text: str, expected: str | None) -> None:
    assert edited_text(text, {("a", "c"): 7}) == expected
