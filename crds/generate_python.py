"""Writes client/bamboo/jobs/fields.py, the fields of a manifest as types, from crds/bamboojob.yaml: `make docs`.

A test fails if the committed file is stale.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
CRD, FILE = ROOT / "crds" / "bamboojob.yaml", ROOT / "client" / "bamboo" / "jobs" / "fields.py"
WIDTH = 120
HEAD = '''\
"""The fields of a manifest, for editors and type checkers. They are named as in YAML; docs/api.md says the same.

Made by `make docs` from crds/bamboojob.yaml; change the types in core/bamboo_core/job/ instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict
'''
Schema = dict[str, Any]


def module(crd: Schema) -> str:
    version = crd["spec"]["versions"][0]  # all have one schema
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    parts = {**spec, "properties": {name: one for name, one in spec["properties"].items() if name != "task"}}
    parts["description"] = "The parts of a job beside its task."
    task = spec["properties"]["task"]
    found: dict[str, str] = {}
    _add("TaskFields", task, found)
    _add("JobFields", parts, found)
    return "\n\n".join([HEAD, *found.values()])


def _add(name: str, schema: Schema, found: dict[str, str]) -> None:
    """Adds the class of an object, after those of the objects in it. Raises ValueError if two have one name."""
    fields = list[str]()
    for field, inner in schema["properties"].items():
        kind = _type(field, inner, found)
        required = f"Required[{kind}]" if field in schema.get("required", ()) else kind
        fields += [f"    {field}: {required}", *_text(inner["description"], "    ")]
    if name in found:
        raise ValueError(f"two objects would be called {name}")
    said = "\n".join(_text(schema["description"], "    "))
    found[name] = "\n".join([f"class {name}(TypedDict, total=False):", said, "", *fields, ""])


def _type(field: str, schema: Schema, found: dict[str, str]) -> str:
    """The type of a field's values; of the objects in it classes are added."""
    if "enum" in schema:
        return f"Literal[{', '.join(_quoted(value) for value in schema['enum'])}]"
    match schema.get("type"):
        case "integer":
            return "int"
        case "number":
            return "float"
        case "boolean":
            return "bool"
        case "string":
            return "str"
        case "array":
            singular = field.removesuffix("s")
            return f"Sequence[{_type(singular, schema['items'], found)}]"
        case "object" if "properties" in schema:
            name = f"{field[0].upper()}{field[1:]}Fields"
            _add(name, schema, found)
            return name
        case "object" if "x-kubernetes-int-or-string" in schema.get("additionalProperties", {}):
            return "Mapping[str, str | int]"
        case "object" if schema.get("additionalProperties", {}).get("type") == "string":
            return "Mapping[str, str]"
        case "object":
            return "Mapping[str, Any]"
    word = str(schema.get("pattern", "")).strip("^$")
    return f"int | Literal[{_quoted(word)}]" if word.isalpha() else "int | str"


def _quoted(value: str) -> str:
    return f'"{value}"'


def _text(said: str, indent: str) -> Iterator[str]:
    """A docstring, which is on one line if there is room."""
    whole = f'{indent}"""{said}"""'
    if len(whole) <= WIDTH:
        yield whole
        return
    wide = WIDTH - len(indent)
    if wide - len('"""') < len(f'"""{said}') <= wide:  # room for the text alone; the formatter wants no line of quotes
        wide -= len('"""')
    lines = textwrap.wrap(f'"""{said}', wide, break_long_words=False, break_on_hyphens=False)
    yield from (indent + line for line in lines)
    yield f'{indent}"""'


if __name__ == "__main__":
    FILE.write_text(module(yaml.safe_load(CRD.read_text())))
