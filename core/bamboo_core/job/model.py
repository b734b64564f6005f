"""Annotations and marks that turn dataclasses into the API of a BambooJob, and a generic reader of manifests.

A field's annotation gives the form of its values (`bamboo_core.job.forms`; booleans, enumerations and objects need
none) and its marks. The text below a field is its description. The parser (`read_object`), the CRD and docs/api.md
are made from these; rules between fields are in `bamboo_core.job.manifest_rules`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from bamboo_core.job.fields import Fields, Problem, join, list_fits, show
from bamboo_core.job.forms import FieldForm, Flag, OneOf, TextOf
from bamboo_core.job.text_patterns import TextPattern

Values = dict[str, Any]
Completion = Callable[[Values], None]


class Mark(Enum):
    """A property of a field, given in its annotation."""

    FIXED = auto()  # it cannot change
    WHILE_SUSPENDED = auto()  # it can change only while the job is suspended, but for the fields in it that are FREE
    FREE = auto()  # it can change at any time, though its object cannot
    FOLLOWS = auto()  # where it is absent, its value follows from other fields'
    NOT_IN_SPEC = auto()  # the manifest's spec does not contain it
    NO_NUMBERS = auto()  # `edits.numbers_digest` leaves it out


@dataclass(frozen=True, slots=True)
class Object:
    """The form of a field that is an object of the API. optional: an absent field is None, not an empty object."""

    kind: type
    optional: bool


@dataclass(frozen=True, slots=True)
class ObjectList:
    """The form of a field that is a list of objects of the API with unique names. most: the list's greatest length."""

    kind: type
    most: int


@dataclass(frozen=True, slots=True)
class ListOf:
    """The annotation of a field that is a list of objects, with the list's maximum length."""

    most: int


@dataclass(frozen=True, slots=True)
class ApiField:
    """A field of a type of the API. name: in manifests. default: returns a default value; None without a default."""

    attribute: str
    name: str
    form: FieldForm | Object | ObjectList
    marks: frozenset[Mark]
    default: Callable[[], Any] | None

    @property
    def required(self) -> bool:
        return self.default is None and Mark.FOLLOWS not in self.marks


@dataclass(frozen=True, slots=True)
class ReadObject:
    """An object that was read, and its path. given: the names of fields that the manifest gives, right or wrong."""

    path: str
    value: Any
    given: frozenset[str]


@cache
def api_fields(kind: type) -> tuple[ApiField, ...]:
    """Return the fields that a manifest may give for an object of the type `kind`."""
    hints = get_type_hints(kind, include_extras=True)
    fields = (_api_field(one, hints[one.name]) for one in dataclasses.fields(kind))
    return tuple(one for one in fields if one is not None)


def _api_field(one: "dataclasses.Field[Any]", hint: Any) -> ApiField | None:
    hint, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    marks = frozenset(mark for mark in annotations if isinstance(mark, Mark))
    if Mark.NOT_IN_SPEC in marks:
        return None
    first, *rest = one.name.split("_")
    name = first + "".join(part.capitalize() for part in rest)
    return ApiField(one.name, name, _form(hint, annotations), marks, _default(one))


def _default(one: "dataclasses.Field[Any]") -> Callable[[], Any] | None:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory
    value = one.default
    return None if value is dataclasses.MISSING else lambda: value


def _form(hint: Any, annotations: list[Any]) -> FieldForm | Object | ObjectList:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind: type = next(member for member in members if member is not NoneType)
    for one in annotations:
        if isinstance(one, ListOf):
            return ObjectList(get_args(kind)[0], one.most)
        if isinstance(one, TextPattern):
            return TextOf(one)
        if not isinstance(one, Mark):
            form: FieldForm = one
            return form
    if kind is bool:
        return Flag()
    if issubclass(kind, StrEnum):
        return OneOf(kind)
    assert dataclasses.is_dataclass(kind), f"{hint} says no form"
    return Object(kind, optional=NoneType in members)


_completions: dict[type, Completion] = {}


def completes(kind: type) -> Callable[[Completion], Completion]:
    """Return a decorator that registers a function to derive fields of objects of the type `kind` from other fields.
    The function changes the values in place, before defaults apply. An absent or wrong value is None; a map, an object
    or a list of objects is empty instead, but an absent optional object is None.
    """

    def register(completion: Completion) -> Completion:
        _completions[kind] = completion
        return completion

    return register


def read_object(kind: type, fields: Fields, objects: list[ReadObject], **known: Any) -> Any:
    """Read an object of the type `kind`. Each wrong value is noted as a problem; a default or harmless one replaces it.

    objects: collects this object and the objects in it. known: values of its fields that the manifest's spec does not
    contain.
    """
    fields.refuse_unknown([one.name for one in api_fields(kind)])
    values: Values = dict(known)
    for one in api_fields(kind):
        values[one.attribute] = _read(one, fields, objects)
    given = frozenset(one.name for one in api_fields(kind) if fields.get(one.name) is not None)
    if complete := _completions.get(kind):
        complete(values)
    for one in api_fields(kind):
        if values[one.attribute] is None:
            values[one.attribute] = one.default() if one.default else _harmless(one.form)
    value = kind(**values)
    objects.append(ReadObject(fields.path, value, given))
    return value


def _read(one: ApiField, fields: Fields, objects: list[ReadObject]) -> Any:
    match one.form:
        case Object(kind, optional):
            if optional and fields.get(one.name) is None:
                return None
            return read_object(kind, fields.child(one.name), objects)
        case ObjectList(kind, most):
            return _read_list(kind, most, one.name, fields, objects)
        case form:
            if one.required:
                fields.require(one.name, form.description)
            return form.read(fields, one.name)


def _read_list(kind: type, most: int, name: str, fields: Fields, objects: list[ReadObject]) -> tuple[Any, ...]:
    items = fields.value(name, f"a list of at most {most} objects", list_fits(0, most)) or ()
    path = fields.at(name)
    read = [
        read_object(kind, Fields(v, f"{path}[{i}]", fields.problems, fields.places), objects)
        for i, v in enumerate(items)
    ]
    names: list[str] = [getattr(item, "name", "") for item in read]
    for i, used in enumerate(names):
        if used and names.index(used) < i:
            message = f"{show(used)} is already used by {path}[{names.index(used)}].name"
            fields.problems.append(Problem(f"{path}[{i}].name", message))
    return tuple(read)


def _harmless(form: FieldForm | Object | ObjectList) -> Any:
    return None if isinstance(form, Object | ObjectList) else form.harmless


def places(kind: type, above: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the path of every field, at any depth, of an object of the type `kind`, except the fields of
    objects in lists. above: the path of the object.
    """
    for one in api_fields(kind):
        path = join(above, one.name)
        yield one.name, path
        if isinstance(one.form, Object):
            yield from places(one.form.kind, path)
