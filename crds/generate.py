"""Writes the CRD in this folder: `make docs`. A test fails if the committed file is stale.

The spec's schema is made from `bamboo_core.job.spec.JobSpec`: forms, bounds and defaults are in its
annotations, descriptions below its fields, rules in `bamboo_core.job.manifest_rules`. The status's is made from
`bamboo_core.job.status.BambooJobStatus`. All else is in crds/frame.yaml.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from msgspec.inspect import (
    AnyType,
    DateTimeType,
    DictType,
    FloatType,
    IntType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)
from msgspec.inspect import type_info as inspect_type

from bamboo_core.job.forms import ANYTHING, VALIDATIONS, Schema
from bamboo_core.job.manifest_rules import RULES
from bamboo_core.job.model import (
    ApiField,
    Mark,
    Object,
    ObjectList,
    api_fields,
)
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus

FRAME, FILE = (Path(__file__).parent / name for name in ("frame.yaml", "bamboojob.yaml"))
HEAD = "# Made by `make docs` from the types in core/bamboo_core/job/ and from crds/frame.yaml; change those instead.\n"
CANNOT_CHANGE = "cannot change; create a new job instead"
ONLY_SUSPENDED = "can change only while the job is suspended"
COMES_AND_GOES = "can come or go only while the job is suspended"


def crd(frame: dict[str, Any]) -> dict[str, Any]:
    """The frame with the schemas of spec and status."""
    (version,) = frame["spec"]["versions"]
    spec = object_schema(JobSpec)
    spec[VALIDATIONS] += [*_suspended_rules(JobSpec, "")]
    status = status_schema(inspect_type(BambooJobStatus))
    version["schema"]["openAPIV3Schema"]["properties"] |= {
        "spec": {"description": class_description(JobSpec), **spec},
        "status": {"description": class_description(BambooJobStatus), **status},
    }
    return frame


def text(document: dict[str, Any]) -> str:
    """Return what crds/bamboojob.yaml has to say."""
    return HEAD + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def stored_default(one: ApiField) -> Any:
    """Return the value that an API server stores where the field is absent; None if it stores none."""
    if one.default is not None and Mark.FOLLOWS not in one.marks and isinstance(one.default(), bool | int | str):
        return one.default()
    return None if isinstance(one.form, Object | ObjectList) else one.form.schema().get("default")


def object_schema(kind: type) -> Schema:
    """The schema of such an object, but for its description, which is the field's that it is in."""
    fields = api_fields(kind)
    required = [one.name for one in fields if one.required]
    rules = [*_rules(kind), *_kept_if_absent(fields)]
    return {
        "type": "object",
        **({"required": required} if required else {}),
        **({VALIDATIONS: rules} if rules else {}),
        "properties": {one.name: _field_schema(kind, one) for one in fields},
    }


def _field_schema(kind: type, one: ApiField) -> Schema:
    described = {"description": descriptions(kind)[one.attribute]}
    fixed = Mark.FIXED in one.marks and not _may_be_absent(one)
    rules = [{"rule": "self == oldSelf", "message": CANNOT_CHANGE}] if fixed else []
    match one.form:
        case Object(inner, optional):
            schema = object_schema(inner)
            stored = Mark.FOLLOWS in one.marks or _has_defaults(schema)
            default = {"default": {}} if stored and not optional and not one.required else {}
        case ObjectList(inner, most):
            named = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
            items = {**object_schema(inner), "description": class_description(inner)}
            schema, default = {"type": "array", "maxItems": most, **named, "items": items}, {}
        case form:
            stored = stored_default(one)
            schema, default = form.schema(), {} if stored is None else {"default": stored}
    rules = [*schema.pop(VALIDATIONS, ()), *rules]
    return {**schema, **default, **described, **({VALIDATIONS: rules} if rules else {})}


def _has_defaults(schema: Schema) -> bool:
    return any("default" in inner or _has_defaults(inner) for inner in schema.get("properties", {}).values())


def _may_be_absent(one: ApiField) -> bool:
    """Can an object be stored without it? Then a rule of its own would not see that it comes or goes."""
    if isinstance(one.form, Object):
        return one.form.optional
    return not one.required and stored_default(one) is None


# Rules


def _rules(kind: type) -> Iterator[Schema]:
    for rule in RULES.get(kind, ()):
        path = {"fieldPath": f".{rule.path}"} if rule.path else {}
        yield {"rule": rule.cel, **path, "message": rule.expected}


def _kept_if_absent(fields: tuple[ApiField, ...]) -> Iterator[Schema]:
    """Those by which what may be absent cannot change."""
    for one in fields:
        if Mark.FIXED in one.marks and _may_be_absent(one):
            yield {"rule": _same(one, one.name), "fieldPath": f".{one.name}", "message": CANNOT_CHANGE}


def _same(one: ApiField, path: str) -> str:
    if not _may_be_absent(one):
        return f"self.{path} == oldSelf.{path}"
    return f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || self.{path} == oldSelf.{path})"


def _suspended_rules(kind: type, above: str) -> Iterator[Schema]:
    """Those of what can change only while the job is suspended; of the whole spec, which says whether it is."""
    for one in api_fields(kind):
        path = f"{above}{one.name}"
        inside = api_fields(one.form.kind) if isinstance(one.form, Object) else ()
        if Mark.WHILE_SUSPENDED not in one.marks:
            yield from _suspended_rules(one.form.kind, f"{path}.") if isinstance(one.form, Object) else ()
            continue
        free = [inner.name for inner in inside if Mark.FREE in inner.marks]
        kept = [_same(inner, f"{path}.{inner.name}") for inner in inside if Mark.FREE not in inner.marks]
        same = " && ".join(kept) if free else _same(one, path)
        message = f"{ONLY_SUSPENDED}, except {' and '.join(free)}" if free else ONLY_SUSPENDED
        if free and not kept:
            same, message = f"has(self.{path}) == has(oldSelf.{path})", COMES_AND_GOES
        yield {"rule": f"oldSelf.suspend || self.suspend || ({same})", "fieldPath": f".{path}", "message": message}


# The status


def status_schema(told: Type) -> Schema:
    """The schema of a type of the status, as msgspec sees it."""
    match told:
        case Metadata(type=inner, extra_json_schema=more):
            return {**status_schema(inner), **(more or {})}
        case UnionType(types=types):
            (inner,) = (one for one in types if not isinstance(one, NoneType))
            return status_schema(inner)
        case StructType(cls=kind, fields=fields):
            said = descriptions(kind)
            inside = {one.encode_name: {**status_schema(one.type), "description": said[one.name]} for one in fields}
            return {"type": "object", "properties": inside}
        case VarTupleType(item_type=item):
            return {"type": "array", "items": status_schema(item)}
        case DictType(value_type=value):
            return {"type": "object", "additionalProperties": status_schema(value)}
        case IntType():
            return {"type": "integer"}
        case FloatType():
            return {"type": "number", "format": "double"}
        case DateTimeType():
            return {"type": "string", "format": "date-time"}
        case StrType():
            return {"type": "string"}
        case AnyType():
            return dict(ANYTHING)
    raise TypeError(f"{told} has no schema")


# Descriptions


@cache
def descriptions(kind: type) -> dict[str, str]:
    """The texts below the type's fields."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            said = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
            found[field.target.id] = " ".join(said.split())
    return found


def class_description(kind: type) -> str:
    """The first paragraph of its docstring."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


class _Dumper(yaml.SafeDumper):
    """Writes long texts folded, and all else as PyYAML does."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=">" if len(value) > 90 else None)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)  # enumerations


if __name__ == "__main__":
    FILE.write_text(text(crd(yaml.safe_load(FRAME.read_text()))))
