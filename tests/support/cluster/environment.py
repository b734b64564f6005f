"""A container's environment, command and arguments, as a kubelet makes them."""

import base64
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.downward import Unknown, field, resource

Json = dict[str, Any]
Read = Callable[[str, str], Awaitable[Json | None]]  # ("configmaps" or "secrets", name) -> the object, if there is one
REFERENCE = re.compile(r"\$(\$|\((\w[\w.-]*)\))")


async def environment(
    pod: Json, container: Json, base: Mapping[str, str], allocatable: Json, read: Read
) -> dict[str, str]:
    """base: what is set before the pod's own variables."""
    found = dict(base)
    for source in container.get("envFrom", []):
        for kind, key in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if key in source:
                values = await contents(kind, source[key], read)
                found |= {source.get("prefix", "") + name: value.decode() for name, value in values.items()}
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            value = await _value(pod, container, entry["valueFrom"], allocatable, read)
            if value is not None:
                found[entry["name"]] = value
        else:
            found[entry["name"]] = expand(entry.get("value", ""), found)
    return found


async def _value(pod: Json, container: Json, source: Json, allocatable: Json, read: Read) -> str | None:
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource(container, source["resourceFieldRef"], allocatable)
    kind, key = ("configmaps", "configMapKeyRef") if "configMapKeyRef" in source else ("secrets", "secretKeyRef")
    reference = source[key]
    values = await contents(kind, reference, read)
    if reference["key"] in values:
        return values[reference["key"]].decode()
    if reference.get("optional"):
        return None
    raise Unknown(f'couldn\'t find key {reference["key"]} in {kind} "{reference["name"]}"')


async def contents(kind: str, reference: Json, read: Read) -> dict[str, bytes]:
    """The data of a config map or secret; nothing if it is missing and optional."""
    name = reference.get("name") or reference["secretName"]
    found = await read(kind, name)
    if found is None:
        if reference.get("optional"):
            return {}
        raise Unknown(f'{kind} "{name}" not found')
    data = found.get("data") or {}
    if kind == "secrets":
        return {key: base64.b64decode(value) for key, value in data.items()}
    binary = {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
    return {key: value.encode() for key, value in data.items()} | binary


def expand(text: str, values: Mapping[str, str]) -> str:
    """$(NAME) by its value if there is one; $$ by $."""
    return REFERENCE.sub(lambda m: "$" if m[1] == "$" else values.get(m[2], m[0]), text)


def command(container: Json, entrypoint: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The words of a container's command as in an image: command replaces the entrypoint, args are appended."""
    words = [*(container.get("command") or entrypoint), *container.get("args", [])]
    return [expand(word, values) for word in words]
