"""Writes core/bamboo_core/job/pod_fields.json, the names of all fields of a pod template: `make docs`.

They are those of Kubernetes' own schemas, of every version that Bamboo supports and that kubernetes-validate has.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kubernetes_validate import utils

FILE = Path(__file__).parent / "bamboo_core" / "job" / "pod_fields.json"
OLDEST = 29
ROOT = "io.k8s.api.core.v1.PodTemplateSpec"
FREE = ("FieldsV1",)  # of metadata.managedFields: its fields are named after other fields


def minors() -> list[int]:
    """The minor versions that there are schemas of, from the oldest that Bamboo supports."""
    return sorted(minor for minor in map(_minor, utils.all_versions()) if minor >= OLDEST)


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def definitions(minor: int) -> Mapping[str, Any]:
    version = f"1.{minor}"
    found = utils.schema_contents(f"kubernetes-json-schema/v{version}.0-local/_definitions.json", version)
    known: Mapping[str, Any] = found["$defs"]
    return known


def fields(known: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str]]:
    """Name and kind of each field; "" is a kind without fields, such as a string, or with any."""
    for name, schema in known[kind].get("properties", {}).items():
        reference = schema.get("items", schema).get("$ref", "").rpartition("/")[2]
        has_fields = bool(reference) and "properties" in known[reference] and _short(reference) not in FREE
        yield name, reference if has_fields else ""


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


def collect(known: Mapping[str, Any], kind: str, found: dict[str, dict[str, str]]) -> None:
    """Adds that kind, and all that it is made of."""
    todo, seen = [kind], set()
    while todo:
        kind = todo.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for name, inner in fields(known, kind):
            found.setdefault(_short(kind), {})[name] = _short(inner)
            todo += [inner] if inner else []


def text() -> str:
    found: dict[str, dict[str, str]] = {}
    for minor in minors():
        collect(definitions(minor), ROOT, found)
    kinds = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found[kind], sort_keys=True)}" for kind in sorted(found))
    return f'{{"newest": {minors()[-1]},\n"kinds": {{\n{kinds}\n}}}}\n'


if __name__ == "__main__":
    FILE.write_text(text())
