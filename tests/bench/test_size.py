"""bench/size.py: the counts of code lines and fields."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MODULE = '''"""A module.

Its docstring has three lines.
"""

# A comment.
X = (
    1,  # one
)


def f() -> str:
    """Return text."""
    return """two
    lines"""
'''


@pytest.fixture(scope="module")
def size() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "bench")
        yield importlib.import_module("size")


def test_blank_lines_comments_and_docstrings_are_no_code(size: Any, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(MODULE)
    assert size.code_lines(file) == 6


def test_fields_inside_lists_and_maps_count(size: Any) -> None:
    inner = {"type": "object", "properties": {"c": {"type": "string"}}}
    schema = {"properties": {"a": {"items": inner}, "b": {"additionalProperties": inner}, "d": {"type": "integer"}}}
    assert size.fields(schema) == 5
