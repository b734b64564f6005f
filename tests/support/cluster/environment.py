"""A container's environment and command, as a kubelet makes them, and the data of ConfigMaps and Secrets."""

import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Json = dict[str, Any]
Read = Callable[[str, str], Awaitable[Json | None]]  # ("configmaps" or "secrets", name) -> the object, if it exists
REFERENCE = re.compile(r"\$(\$|\((\w[\w.-]*)\))")


class Unknown(Exception):
    """Raised if a container needs a field or object that is missing or unsupported. The container waits and retries."""


def environment(pod: Json, container: Json, base: Mapping[str, str]) -> dict[str, str]:
    """Return a container's variables. base: variables that the container's own may use or replace. Raises Unknown."""
    found = dict(base)
    for entry in container.get("env", []):
        reference = entry.get("valueFrom")
        found[entry["name"]] = pod_field(pod, reference) if reference else expand(entry.get("value", ""), found)
    return found


def pod_field(pod: Json, reference: Json) -> str:
    """Return the text field of a pod that a fieldRef names, such as status.podIP. Raises Unknown."""
    if "fieldRef" not in reference:
        raise Unknown(f"the test cluster has no references of this type: {sorted(reference)}")
    path = reference["fieldRef"]["fieldPath"]
    section, _, name = path.partition(".")
    found = pod.get(section, {}).get(name)
    if not isinstance(found, str):
        raise Unknown(f"the pod has no field {path}")
    return found


async def contents(kind: str, reference: Json, read: Read) -> dict[str, bytes]:
    """Return the decoded data of a ConfigMap or Secret; {} if an optional one does not exist. Raises Unknown."""
    name = reference.get("name") or reference["secretName"]
    found = await read(kind, name)
    if found is None and reference.get("optional"):
        return {}
    if found is None:
        raise Unknown(f'{kind} "{name}" not found')
    data = found.get("data") or {}
    return {key: base64.b64decode(value) if kind == "secrets" else value.encode() for key, value in data.items()}


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace $(NAME) by the variable's value, if it has one, and $$ by $."""
    return REFERENCE.sub(lambda m: "$" if m[1] == "$" else values.get(m[2], m[0]), text)


def command(container: Json, values: Mapping[str, str]) -> list[str]:
    """Return a container's command and arguments, with $(NAME) replaced by `values`."""
    words = [*container.get("command", []), *container.get("args", [])]
    return [expand(word, values) for word in words]
