"""Objects of the Kubernetes API as frozen values, and how they are read and written.

Reading is lenient, because an older or newer version may have written the object: a field that is unknown, null or of
another type counts as absent, and an absent field has a default.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import msgspec

Time = Annotated[datetime, msgspec.Meta(tz=True)]
P = TypeVar("P", bound="ApiPart")
NOTHING: Final = object()  # what of a field can be read


class ApiPart(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object of the API, or a part of one. Attributes are the API's fields in snake_case. An optional field has a
    default: None if absence must differ from every value.
    """


class OwnerReference(ApiPart, frozen=True):
    kind: str
    uid: str
    controller: bool = False


class Metadata(ApiPart, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()


def whole_seconds(when: datetime) -> datetime:
    """Return a time in the API's format, to the second."""
    return when.astimezone(UTC).replace(microsecond=0)


def read_leniently(kind: type[P], said: Any) -> P:
    """Return the object as that kind, whose fields all have defaults."""
    return _fitting(kind, without_nulls(said))


def without_nulls(value: Any) -> Any:
    """Return a copy of the document without null fields, which are absent to Kubernetes."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _fitting(kind: type[P], said: Any) -> P:
    found = {}
    for one in msgspec.structs.fields(kind) if isinstance(said, Mapping) else ():
        if one.encode_name in said and (value := _value(one.type, said[one.encode_name])) is not NOTHING:
            found[one.name] = value
    return kind(**found)


def _value(hint: Any, said: Any) -> Any:
    """Return the value as that type; of a part, a list or a mapping the entries that fit; NOTHING if nothing fits."""
    try:
        return msgspec.convert(said, hint)
    except msgspec.ValidationError:
        pass
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]  # of a scalar the bounds are what it broke: nothing below fits it
    if isinstance(hint, type) and issubclass(hint, ApiPart):
        return _whole(hint, said)
    if get_origin(hint) is tuple and isinstance(said, list):
        return tuple(found for item in said if (found := _value(get_args(hint)[0], item)) is not NOTHING)
    if get_origin(hint) is dict and isinstance(said, Mapping):
        kind = get_args(hint)[1]
        return {name: found for name, item in said.items() if (found := _value(kind, item)) is not NOTHING}
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
        if kind is not NoneType and (found := _value(kind, said)) is not NOTHING:
            return found
    return NOTHING


def _whole(kind: type[ApiPart], said: Any) -> Any:
    """Return the part with the fields that fit; NOTHING if a required field does not."""
    try:
        return _fitting(kind, said)
    except TypeError:
        return NOTHING


def written(part: ApiPart) -> dict[str, Any]:
    """Return the part as the API has it, without fields that are None and without empty parts."""
    told = {one.encode_name: _written(getattr(part, one.name)) for one in msgspec.structs.fields(part)}
    return {name: value for name, value in told.items() if value is not None}


def _written(value: Any) -> Any:
    if isinstance(value, ApiPart):
        return written(value) or None
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return value
