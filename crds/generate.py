"""Generator of the CRD in this folder, run by `make docs`. A test fails if the committed file is stale.

The spec's schema is made from `bamboo_core.job.spec.JobSpec`: forms, bounds and defaults come from its fields,
descriptions from the strings below these. The functions of `bamboo_core.job.manifest_rules` become CEL rules. The
status's schema is made from `bamboo_core.job.status.BambooJobStatus`. All else is in crds/frame.yaml.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, reduce
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import yaml
from msgspec.structs import fields as struct_fields

from bamboo_core.job.api_object import ApiPart
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
SCALARS: Final[dict[Any, Schema]] = {  # types of the status
    int: {"type": "integer"},
    float: {"type": "number", "format": "double"},
    datetime: {"type": "string", "format": "date-time"},
    str: {"type": "string"},
    Any: ANYTHING,
}
CHANGES: Final = {Mark.FIXED: " Cannot change.", Mark.WHILE_SUSPENDED: " Can change only while the job is suspended."}
COMES_AND_GOES = "can come or go only while the job is suspended"


def crd(frame: dict[str, Any]) -> dict[str, Any]:
    """Return the CRD: the frame, to which the schemas of spec and status are added in place."""
    (version,) = frame["spec"]["versions"]
    spec = object_schema(JobSpec)
    spec[VALIDATIONS] += [*_suspended_rules(JobSpec, "")]
    status = status_schema(BambooJobStatus)
    version["schema"]["openAPIV3Schema"]["properties"] |= {
        "spec": {"description": class_description(JobSpec), **spec},
        "status": {"description": class_description(BambooJobStatus), **status},
    }
    return frame


def text(document: dict[str, Any]) -> str:
    """Return the text of crds/bamboojob.yaml."""
    return HEAD + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def stored_default(one: ApiField) -> Any:
    """Return the value that an API server stores for an absent field; None if none, or for objects and lists."""
    if one.default is not None and Mark.FOLLOWS not in one.marks and isinstance(one.default(), bool | int | str):
        return one.default()
    return None if isinstance(one.form, Object | ObjectList) else one.form.schema().get("default")


def object_schema(kind: type) -> Schema:
    """Return the schema of an object of that type, without a description: the field that holds it has one."""
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
    described = {"description": descriptions(kind)[one.attribute] + _when_it_changes(one)}
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


def _when_it_changes(one: ApiField) -> str:
    """Return the sentence on when a field may change; "" if at any time, or if a rule's message explains it."""
    if isinstance(one.form, Object) and any(Mark.FREE in inner.marks for inner in api_fields(one.form.kind)):
        return ""
    return "".join(text for mark, text in CHANGES.items() if mark in one.marks)


def _has_defaults(schema: Schema) -> bool:
    return any("default" in inner or _has_defaults(inner) for inner in schema.get("properties", {}).values())


def _may_be_absent(one: ApiField) -> bool:
    """Return whether objects may be stored without the field. The field's own rules would not see it come or go."""
    if isinstance(one.form, Object):
        return one.form.optional
    return not one.required and stored_default(one) is None


# Rules


def _rules(kind: type) -> Iterator[Schema]:
    for rule in RULES.get(kind, ()):
        path = {"fieldPath": f".{rule.path}"} if rule.path else {}
        yield {"rule": cel(rule.holds, Term("self", kind)).text, **path, "message": rule.expected}


def _kept_if_absent(fields: tuple[ApiField, ...]) -> Iterator[Schema]:
    """Yield an object's rules that optional fixed fields stay as they are, present or absent."""
    for one in fields:
        if Mark.FIXED in one.marks and _may_be_absent(one):
            yield {"rule": _same(one, one.name), "fieldPath": f".{one.name}", "message": CANNOT_CHANGE}


def _same(one: ApiField, path: str) -> str:
    if not _may_be_absent(one):
        return f"self.{path} == oldSelf.{path}"
    return f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || self.{path} == oldSelf.{path})"


def _suspended_rules(kind: type, above: str) -> Iterator[Schema]:
    """Yield the rules for fields that can change only while the job is suspended. They belong to the whole
    spec, because it has `suspend`.
    """
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


# Rules in CEL


CONDITIONAL, UNARY, PRIMARY = 0, 6, 7  # how tightly an expression binds
OPERATORS: Final = {
    ast.Or: ("||", 1),
    ast.And: ("&&", 2),
    **{kind: (text, 3) for kind, text in {ast.Eq: "==", ast.Is: "==", ast.NotEq: "!="}.items()},
    **{kind: (text, 3) for kind, text in {ast.LtE: "<=", ast.GtE: ">="}.items()},
    **{kind: (text, 4) for kind, text in {ast.Add: "+", ast.Sub: "-"}.items()},
    **{kind: (text, 5) for kind, text in {ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%"}.items()},
}


@dataclass(frozen=True, slots=True)
class Term:
    """A CEL expression. kind: the Python type of the object, or of the objects in the list, that it denotes."""

    text: str
    kind: type | None = None
    binds: int = PRIMARY

    def within(self, binds: int) -> str:
        """Return the text, in parentheses if its precedence is below `binds`."""
        return self.text if self.binds >= binds else f"({self.text})"


def cel(function: Callable[..., Any], *arguments: Term) -> Term:
    """Translate the final return of a `manifest_rules` function or a property into CEL, with these arguments."""
    (definition,) = ast.parse(dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    *_, last = definition.body
    assert isinstance(last, ast.Return)
    assert last.value is not None
    names = [argument.arg for argument in definition.args.args]
    return Translation(function.__globals__, dict(zip(names, arguments, strict=True))).term(last.value)


@dataclass(frozen=True, slots=True)
class Translation:
    """A translator of a Python function's expressions into CEL. outside: the module's names. names: the arguments."""

    outside: Mapping[str, Any]
    names: Mapping[str, Term]

    def term(self, node: ast.expr) -> Term:
        match node:
            case ast.BoolOp(op, values):
                sign, binds = OPERATORS[type(op)]
                return Term(f" {sign} ".join(self.term(value).within(binds) for value in values), None, binds)
            case ast.Compare(one, [ast.Is() | ast.IsNot() as op], [ast.Constant(None)]):
                there = f"has({self.term(one).text})"
                return Term(there) if isinstance(op, ast.IsNot) else Term(f"!{there}", None, UNARY)
            case ast.BinOp(one, op, other) | ast.Compare(one, [op], [other]):
                sign, binds = OPERATORS[type(op)]
                return Term(f"{self.term(one).within(binds)} {sign} {self.term(other).within(binds + 1)}", None, binds)
            case ast.UnaryOp(ast.Not(), one):
                return Term(f"!{self.term(one).within(UNARY)}", None, UNARY)
            case ast.IfExp(test, one, other):
                parts = self.term(test).within(1), self.term(one).within(1), self.term(other).text
                return Term("{} ? {} : {}".format(*parts), None, CONDITIONAL)
            case ast.Call(ast.Name("all"), [ast.GeneratorExp(each, [ast.comprehension(ast.Name(name), values)])]):
                of = self.term(values)
                inner = Translation(self.outside, {**self.names, name: Term(name, of.kind)}).term(each)
                return Term(f"{of.text}.all({name}, {inner.text})")
            case ast.Call(ast.Name("len" | "str" as name), [one]):
                return Term(f"{ {'len': 'size', 'str': 'string'}[name] }({self.term(one).text})")
            case ast.Call(ast.Attribute(one, "endswith"), [end]):
                return Term(f"{self.term(one).text}.endsWith({self.term(end).text})")
            case ast.Call(ast.Name(name), arguments):
                return cel(self.outside[name], *map(self.term, arguments))
            case ast.Subscript(one, key):
                return Term(f"{self.term(one).text}[{self.term(key).text}]")
            case ast.Attribute(ast.Name(name), attribute) if name not in self.names:
                return literal(getattr(self.outside[name], attribute))
            case ast.Attribute(one, attribute):
                return field_of(self.term(one), attribute)
            case ast.Name(name):
                return self.names[name] if name in self.names else literal(self.outside[name])
            case ast.Constant(value):
                return literal(value)
        raise TypeError(f"no CEL for {ast.unparse(node)}")


def field_of(term: Term, attribute: str) -> Term:
    """Return the CEL of an object's field, or of a property of its type."""
    assert term.kind is not None
    for one in api_fields(term.kind):
        if one.attribute == attribute:
            kind = one.form.kind if isinstance(one.form, Object | ObjectList) else None
            return Term(f"{term.text}.{one.name}", kind)
    return cel(getattr(term.kind, attribute).fget, term)


def literal(value: str | int) -> Term:
    return Term(f"'{value}'" if isinstance(value, str) else str(value))


# The status


def status_schema(hint: Any) -> Schema:
    """Return the OpenAPI schema for a type hint of the status."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in SCALARS:
        return dict(SCALARS[kind])
    if kind is Annotated:
        return reduce(
            lambda made, mark: {**made, **(mark.extra_json_schema or {})}, inside[1:], status_schema(inside[0])
        )
    if kind is tuple:
        return {"type": "array", "items": status_schema(inside[0])}
    if kind is dict:
        return {"type": "object", "additionalProperties": status_schema(inside[1])}
    if kind in (Union, UnionType):
        return status_schema(next(one for one in inside if one is not NoneType))
    assert issubclass(kind, ApiPart), f"{hint} has no schema"
    said, hints = descriptions(kind), get_type_hints(kind, include_extras=True)
    properties = {
        one.encode_name: {**status_schema(hints[one.name]), "description": said[one.name]}
        for one in struct_fields(kind)
    }
    return {"type": "object", "properties": properties}


# Descriptions


@cache
def descriptions(kind: type) -> dict[str, str]:
    """Return the description of each field of a type: the string below the field in the source."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            said = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
            found[field.target.id] = " ".join(said.split())
    return found


def class_description(kind: type) -> str:
    """Return the first paragraph of a type's docstring."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


class _Dumper(yaml.SafeDumper):
    """A YAML writer that folds long texts and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=">" if len(value) > 90 else None)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)  # enumerations


if __name__ == "__main__":
    FILE.write_text(text(crd(yaml.safe_load(FRAME.read_text()))))
