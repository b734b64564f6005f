"""A manifest's text with other values, and its comments, order and quotes as they were. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Path = Sequence[str | int]
WIDE = 10_000  # columns: what is put in stays on its line


def edited_text(text: str, changes: Mapping[tuple[str | int, ...], Any]) -> str | None:
    """The text of one YAML or JSON document with these values at their places; objects that are missing are made.

    None if that cannot be done in place, for instance because a value is used at another place, too: whoever calls it
    has to compare what the result says with what it should say.
    """
    for path, value in changes.items():
        try:
            node = yaml.compose(text)
        except yaml.YAMLError:
            return None
        changed = _changed(text, node, path, value)
        if changed is None:
            return None
        text = changed
    return text


def _changed(text: str, node: yaml.Node | None, path: Path, value: Any) -> str | None:
    for depth, step in enumerate(path):
        inner = _child(node, step)
        if inner is None:
            return _inserted(text, node, step, _nested(path[depth + 1 :], value))
        node = inner
    assert node is not None
    return text[: node.start_mark.index] + _inline(value) + text[_end(text, node) :]


def _child(node: yaml.Node | None, step: str | int) -> yaml.Node | None:
    """What is at a step; None also if it is said to be null, as objects may be."""
    if isinstance(node, yaml.MappingNode):
        found = next((value for key, value in node.value if key.value == step), None)
        return None if found is not None and found.tag == "tag:yaml.org,2002:null" else found
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        inner = node.value[step]
        assert isinstance(inner, yaml.Node)
        return inner
    return None


def _nested(path: Path, value: Any) -> Any:
    for step in reversed(path):
        value = {step: value}
    return value


def _inserted(text: str, node: yaml.Node | None, key: str | int, value: Any) -> str | None:
    """A new field of an object, after its last one."""
    if not isinstance(node, yaml.MappingNode) or not isinstance(key, str) or not node.value:
        return None
    if any(one.value == key for one, _ in node.value):
        return None  # it is null
    if node.flow_style:
        at = _end(text, node.value[-1][1])
        return f"{text[:at]}, {_inline({key: value})[1:-1]}{text[at:]}"
    first, last = node.value[0][0], node.value[-1][1]
    at = text.find("\n", _end(text, last))
    if at < 0:
        text, at = text + "\n", len(text)
    line = " " * first.start_mark.column + f"{key}: {_inline(value)}"
    return f"{text[: at + 1]}{line}\n{text[at + 1 :]}"


def _end(text: str, node: yaml.Node) -> int:
    """The index at which the value itself ends: an object's mark may be far behind it, before what follows."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        begin, end = node.start_mark.index, node.end_mark.index
        return begin + len(text[begin:end].rstrip())
    last = node.value[-1]
    return _end(text, last[1] if isinstance(node, yaml.MappingNode) else last)


def _inline(value: Any) -> str:
    """The value as YAML in one line; objects in braces."""
    made: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=WIDE, allow_unicode=True)
    return made.removesuffix("\n").removesuffix("\n...")
