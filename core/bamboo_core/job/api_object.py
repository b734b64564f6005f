"""Objects of the Kubernetes API as frozen values: how they are read, and how they are written.

Reading is lenient, as an older or newer version may have written the object: a field that is unknown, null or of
another type counts as absent, and what is absent has a default.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar, get_args

import msgspec

Time = Annotated[datetime, msgspec.Meta(tz=True)]
P = TypeVar("P", bound="ApiPart")


class ApiPart(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of an object of the API, or a whole one. Attributes are the API's fields in snake_case; what may be absent
    has a default, which is None where its absence is to be told from every value.
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
    """A time as the API has it."""
    return when.astimezone(UTC).replace(microsecond=0)


def read_leniently(kind: type[P], said: Any) -> P:
    """The object as that kind, all of whose fields have defaults."""
    return _fitting(kind, without_nulls(said))


def without_nulls(value: Any) -> Any:
    """A copy of the document without the fields that are null, which are absent to Kubernetes."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _fitting(kind: type[P], said: Any) -> P:
    found = {}
    for one in msgspec.structs.fields(kind) if isinstance(said, Mapping) else ():
        if one.encode_name not in said:
            continue
        try:
            found[one.name] = msgspec.convert(said[one.encode_name], one.type)
        except msgspec.ValidationError:  # of another type: what of it fits is read
            if (part := _part(one.type)) is not None:
                found[one.name] = _fitting(part, said[one.encode_name])
    return kind(**found)


def _part(hint: Any) -> type[ApiPart] | None:
    """The kind of part that a field is, if it is one."""
    kinds = (kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, ApiPart))
    return next(kinds, None)


def written(part: ApiPart) -> dict[str, Any]:
    """The part as the API has it. What is None, and a part that says nothing, is left out."""
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
