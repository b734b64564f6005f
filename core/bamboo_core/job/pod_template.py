"""Merging pod templates: a user's over the operator's. Maps are merged key by key, and null removes a key. Lists whose
items have a key are merged by it: containers are merged, other items replaced. Any other list is replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The key of a list's items, by the list's name. Items of the first two are merged.
_DEEP = {"containers": "name", "initContainers": "name"}
KEYED = {
    **_DEEP,
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "evictionResponders": "name",
    "hostAliases": "ip",
}


def merge(base: Any, override: Any, name: str = "") -> Any:
    """Return the merged value; neither argument is changed. name: of the field that holds both."""
    if isinstance(base, Mapping) and isinstance(override, Mapping):
        merged = {key: merge(base.get(key), value, key) for key, value in override.items() if value is not None}
        return {key: value for key, value in {**base, **merged}.items() if key in merged or key not in override}
    if isinstance(override, Mapping):
        return {key: merge(None, value, key) for key, value in override.items() if value is not None}
    if isinstance(override, Sequence) and not isinstance(override, str):
        return _merge_lists(base if isinstance(base, list) else [], override, name)
    return override


def _merge_lists(base: Sequence[Any], override: Sequence[Any], name: str) -> list[Any]:
    key = KEYED.get(name)
    if key is None:
        return [merge(None, item) for item in override]
    merged = {item[key]: item for item in base}
    for item in override:
        old = merged.get(item[key]) if name in _DEEP else None
        merged[item[key]] = merge(old, item)
    return list(merged.values())
