"""A simulated API server for the BambooJob CRD: defaults, structural schema, list-map keys and CEL rules.

Like the parser, it is stricter than a real one: it refuses unknown fields, which servers drop, and 1.0 as an integer.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import cel
from jsonschema import Draft4Validator, ValidationError, validators

from bamboo_core.job.manifest import ManifestError, parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.yaml_file import load_document

ROOT = Path(__file__).parents[2]
FILE = ROOT / "crds" / "bamboojob.yaml"
CRD: dict[str, Any] = load_document(str(FILE))
VERSION: dict[str, Any] = CRD["spec"]["versions"][0]


class _Absent:
    """The value of a missing field. Its repr is constant, since names of tests contain it."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = _Absent()
ANYTHING = {"x-kubernetes-preserve-unknown-fields": True, "nullable": True}


def _read(schema: Any) -> Any:
    """Return a copy of the schema in which a map of arbitrary values is an object that preserves unknown fields."""
    if isinstance(schema, list):
        return [_read(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("additionalProperties") == ANYTHING:
        rest = {key: value for key, value in schema.items() if key != "additionalProperties"}
        return {**rest, "x-kubernetes-preserve-unknown-fields": True}
    return {key: _read(value) for key, value in schema.items()}


SCHEMA: dict[str, Any] = _read(VERSION["schema"]["openAPIV3Schema"])


def nodes(schema: Mapping[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, schema) of the root ("") and all fields. Paths of list items end with [], of map values with {}."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def strip_rules(value: Any) -> None:
    """Remove all CEL rules from a CRD, for an API server that is too old for them."""
    if isinstance(value, dict):
        value.pop("x-kubernetes-validations", None)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        strip_rules(inner)


def at(path: str) -> Mapping[str, Any]:
    return dict(nodes())[path]


_HEAD = (f"{CRD['spec']['group']}/{VERSION['name']}", CRD["spec"]["names"]["kind"])
_KNOWN: dict[str, tuple[dict[str, Any], list[str]]] = {}  # results of `_stored`, by the document's text


def defaulted(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document as a server stores it: without status and nulls, with defaults."""
    stored: dict[str, Any] = deepcopy({k: v for k, v in document.items() if k != "status"})
    _default(SCHEMA, stored)
    return stored


def refusals(document: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[str]:
    """Return an API server's reasons to refuse the document, as new or in place of `old`; [] if it has none."""
    new, wrong = _stored(document)
    if (new.get("apiVersion"), new.get("kind")) != _HEAD:
        return [f"expected {_HEAD}"]
    before = _stored(old)[0] if old else ABSENT
    return wrong or [*_duplicates(SCHEMA, new, ""), *broken(SCHEMA, new, before, "")]


def _stored(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the stored document, and the schema's refusals. Cached, since tests ask about the same documents again."""
    text = repr(document)
    if text not in _KNOWN:
        if len(_KNOWN) == KNOWN:
            _KNOWN.clear()
        new = defaulted(document)
        _KNOWN[text] = new, [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in _VALIDATOR.iter_errors(new)]
    return _KNOWN[text]


def _default(schema: Mapping[str, Any], value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _default(schema.get("items", {}), item)
    if not isinstance(value, dict):
        return
    for name, inner in schema.get("properties", {}).items():
        if value.get(name) is None:
            value.pop(name, None)
            if "default" in inner:
                value[name] = deepcopy(inner["default"])
        if name in value:
            _default(inner, value[name])


def parsed(document: Mapping[str, Any]) -> JobSpec | None:
    """Return the job that the parser makes of the document; None if it refuses the document."""
    try:
        return parse_manifest(document)
    except ManifestError:
        return None


# The structural schema


def text_pattern(schema: Mapping[str, Any]) -> str | None:
    """Return a text field's regular expression, without ^ and $, from its CEL rule or `pattern`; None without one."""
    rules = (rule["rule"].partition("self.matches(r'^") for rule in schema.get("x-kubernetes-validations", ()))
    ruled = next((end.removesuffix("$')") for _, found, end in rules if found), None)
    return ruled or schema.get("pattern", "")[1:-1] or None


def _strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    strict = dict(schema)
    if "x-kubernetes-int-or-string" in schema:
        strict["type"] = ["integer", "string"]
    if isinstance(schema.get("additionalProperties"), Mapping):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    if "properties" in schema:
        strict["properties"] = {name: _strict(inner) for name, inner in schema["properties"].items()}
        strict["additionalProperties"] = False
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    return strict


def _strict_root(schema: Mapping[str, Any]) -> dict[str, Any]:
    root = _strict(schema)
    metadata = root["properties"]["metadata"]
    metadata |= {"required": ["name"], "additionalProperties": True}
    return root | {"required": ["metadata", "spec"], "properties": root["properties"] | {"metadata": metadata}}


def _is_integer(_: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    """Yield an error if a text breaks the pattern, which must be ^...$. As in RE2, $ matches only the very end."""
    if isinstance(value, str) and not re.fullmatch(pattern[1:-1], value, re.ASCII):
        yield ValidationError(f"{value!r} does not match {pattern}")


_Judge = validators.extend(
    Draft4Validator, {"pattern": _pattern}, type_checker=Draft4Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)
_VALIDATOR = _Judge(_strict_root(SCHEMA))
STATUS_VALIDATOR = _Judge(_strict(SCHEMA["properties"]["status"]))


# What Kubernetes adds to it


def _duplicates(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        names = [tuple(item[k] for k in schema["x-kubernetes-list-map-keys"]) for item in value if _is_map(schema)]
        if len(set(names)) < len(names):
            yield f"{path}: duplicate key"
    for inner, name, item in _children(schema, value):
        yield from _duplicates(inner, item, f"{path}.{name}")


KNOWN = 256  # documents whose refusals are cached
JUDGED: dict[tuple[str, str], bool] = {}  # by rule and the text of the values that it reads


def _holds(rule: str, value: Any, old: Any) -> bool:
    program = compiled(rule)
    if not _compares(rule):
        return program.execute({"self": value}) is True
    return old is ABSENT or program.execute({"self": value, "oldSelf": old}) is True


def broken(schema: Mapping[str, Any], value: Any, old: Any, path: str) -> Iterator[str]:
    """Yield the messages of broken rules. old: ABSENT for a new value, for which rules on oldSelf always hold."""
    if rules := schema.get("x-kubernetes-validations", ()):
        alone, changed = repr(value), repr((value, old))  # nearly all of it was judged before
        for rule in rules:
            seen = changed if _compares(rule["rule"]) else alone
            if (rule["rule"], seen) not in JUDGED:
                JUDGED[rule["rule"], seen] = _holds(rule["rule"], value, old)
            if not JUDGED[rule["rule"], seen]:
                yield f"{path}{rule.get('fieldPath', '')}: {rule['message']}".lstrip(".")
    for inner, name, item in _children(schema, value):
        yield from broken(inner, item, _old(schema, old, name, item), f"{path}.{name}")


def _children(schema: Mapping[str, Any], value: Any) -> Iterator[tuple[Mapping[str, Any], Any, Any]]:
    if isinstance(value, list):
        yield from ((schema["items"], i, item) for i, item in enumerate(value))
    if isinstance(value, dict):
        fields, values = schema.get("properties", {}), schema.get("additionalProperties")
        yield from ((fields.get(k, values), k, v) for k, v in value.items() if k in fields or values)


def _old(schema: Mapping[str, Any], old: Any, name: Any, item: Any) -> Any:
    if isinstance(old, dict):
        return old.get(name, ABSENT)
    if isinstance(old, list) and _is_map(schema):
        keys = schema["x-kubernetes-list-map-keys"]
        return next((o for o in old if all(o[k] == item[k] for k in keys)), ABSENT)
    return ABSENT


def _is_map(schema: Mapping[str, Any]) -> bool:
    return schema.get("x-kubernetes-list-type") == "map"


@cache
def compiled(rule: str) -> Any:
    return cel.compile(rule)


@cache
def _compares(rule: str) -> bool:
    return "oldSelf" in compiled(rule).variables()
