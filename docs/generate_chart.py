"""Writes the table of values in docs/chart.md from the comments in values.yaml: `make docs`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
VALUES = ROOT / "charts" / "bamboo" / "values.yaml"
PAGE = ROOT / "docs" / "chart.md"
BEGIN, END = "<!-- values: made by `make docs` from values.yaml -->\n", "<!-- end of values -->\n"
LONGEST = 48
KEY = re.compile(r"( *)([A-Za-z]\w*):")


def documented(text: str) -> Iterator[tuple[str, str]]:
    """The values that have a comment right above them: path and comment."""
    stack: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.strip(" #"))
            continue
        if found := KEY.match(line):
            indent = len(found[1])
            stack = [*((depth, key) for depth, key in stack if depth < indent), (indent, found[2])]
            if comment:
                yield ".".join(key for _, key in stack), " ".join(comment)
        comment = []


def table(text: str) -> str:
    values, rows = yaml.safe_load(text), list(documented(text))
    lines = ["| Value | Default | What |", "| --- | --- | --- |"]
    for path, comment in rows:
        inner = any(other.startswith(path + ".") for other, _ in rows)
        default = "" if inner else _default(_at(values, path))
        lines.append(f"| `{path}` | {default} | {comment.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def page(old: str, text: str) -> str:
    """The page with the table of now."""
    head, _, rest = old.partition(BEGIN)
    return head + BEGIN + "\n" + table(text) + "\n" + END + rest.partition(END)[2]


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def _default(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`" if len(text) <= LONGEST else "see `values.yaml`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), VALUES.read_text()))
