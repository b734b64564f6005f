"""A bounded, strict reader of one YAML or JSON file; every mistake is a ManifestError."""

import re
import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import yaml

from bamboo_core.job.fields import ManifestError, Problem, join, show

MAX_BYTES = 1 << 20
MAX_PLACES, MAX_DEPTH = 20_000, 32  # of fields whose lines are kept: aliases can make a small file vast
STDIN = "-"


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """The content of a file. lines: line numbers of its fields, from 1, by their paths. text: as written."""

    name: str
    document: dict[str, Any]
    lines: Mapping[str, int]
    text: str

    def place(self, problem: Problem) -> Problem:
        """Return the problem with the file and line before its path. A missing field has the line of the object that
        should contain it; a problem of the whole document has none.
        """
        path = problem.path
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        where = f"{self.name}:{self.lines[path]}" if path else self.name
        return replace(problem, path=f"{where}: {problem.path}")


class _Loader(yaml.SafeLoader):
    """A loader of safe YAML, as Kubernetes reads it: no duplicate keys, dates stay text, 1e-3 is a number.

    It refuses merge keys, because nested ones can double the document's size at every level.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are refused", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a string", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {show(key)}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def load_document(path: str) -> dict[str, Any]:
    """Read the single object in a file, with its fields unchecked. path: - for standard input. Raises ManifestError."""
    return read_manifest_source(path).document


def read_manifest_source(path: str) -> ManifestSource:
    """Read the single object in a file, with its fields' lines. path: - for standard input. Raises ManifestError."""
    name = "standard input" if path == STDIN else path

    def wrong(message: str) -> ManifestError:
        return ManifestError(Problem(name, message))

    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise wrong("no such file") from None
    except (OSError, ValueError) as error:
        raise wrong(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise wrong("larger than 1 MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise wrong("not valid YAML: not UTF-8 text") from None
    return source_of(name, text)


def source_of(name: str, text: str) -> ManifestSource:
    """Parse the single object in a text, with the lines of its fields. name: for errors. Raises ManifestError."""

    def wrong(message: str) -> ManifestError:
        return ManifestError(Problem(name, message))

    try:
        documents = [(d, node) for d, node in _documents(text) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise wrong(f"not valid YAML{where}: {' '.join((error.problem or 'unreadable').split())}") from None
    except RecursionError:
        raise wrong("not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML lets the errors of explicit tags (`!!int ""`, `!!bool x`) through as they are.
        raise wrong(f"not valid YAML: {getattr(error, 'reason', None) or 'a value does not fit its tag'}") from None
    if len(documents) != 1:
        raise wrong(f"expected one document, got {len(documents)}" if documents else "the file is empty")
    ((document, node),) = documents
    if not isinstance(document, dict):
        raise wrong(f"expected an object, got {show(document)}")
    lines: dict[str, int] = {}
    _note_lines(node, "", lines, MAX_DEPTH)
    return ManifestSource(name, document, lines, text)


def _documents(text: str) -> Iterator[tuple[Any, yaml.Node]]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # since check_node has seen one
            yield loader.construct_document(node), node
    finally:
        loader.dispose()


def _note_lines(node: yaml.Node, path: str, lines: dict[str, int], depth: int) -> None:
    if isinstance(node, yaml.MappingNode):
        inner = [(join(path, str(key.value)), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(f"{path}[{i}]", value, value) for i, value in enumerate(node.value)]
    else:
        return
    for place, key, value in inner:
        if len(lines) >= MAX_PLACES or depth == 0:
            return
        lines.setdefault(place, key.start_mark.line + 1)
        _note_lines(value, place, lines, depth - 1)
