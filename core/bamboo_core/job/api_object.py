"""Objects of the Kubernetes API as frozen values, with functions that read and write them.

Reading ignores unknown fields, treats null as absent, and gives an absent optional field its default.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec

Time = Annotated[datetime, msgspec.Meta(tz=True)]
P = TypeVar("P", bound="ApiPart")


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
    """Return a time in UTC, cut to whole seconds, as the API stores it."""
    return when.astimezone(UTC).replace(microsecond=0)


def read_api_part(kind: type[P], document: Any) -> P:
    """Convert a document of the API to `kind`, whose fields all have defaults. A document that does not fit becomes an
    object of defaults.
    """
    try:
        return msgspec.convert(_without_nulls(document), kind)
    except msgspec.ValidationError:
        return kind()


def _without_nulls(value: Any) -> Any:
    """Return a copy of the document without null fields, which Kubernetes treats as absent."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def written(part: ApiPart) -> dict[str, Any]:
    """Return the part as a JSON object of the API, without fields that are None and without empty parts."""
    fields = {one.encode_name: _written(getattr(part, one.name)) for one in msgspec.structs.fields(part)}
    return {name: value for name, value in fields.items() if value is not None}


def _written(value: Any) -> Any:
    if isinstance(value, ApiPart):
        return written(value) or None
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return value
