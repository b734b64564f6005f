"""Generate docs/api.md from the CRD (`make docs`). A test fails if the committed page is stale.

The committed page describes the fields of `spec` but only names the fields of `status`; the site's page describes both.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
CRD = ROOT / "crds" / "bamboojob.yaml"
PAGE = ROOT / "docs" / "api.md"
MAX_INT = 2**31 - 1
INT_OR_STRING = "x-kubernetes-int-or-string"
# Messages of rules that the fields' own descriptions already give
SAID_OF_FIELDS = ("cannot change; create a new job instead", "can change only while the job is suspended")

SHORT = " `kubectl explain bj.status`, and this page on the site (`make site`), describe the fields."

Schema = Mapping[str, Any]

HEAD = """\
# The BambooJob API

<!-- Made by `make docs` from crds/bamboojob.yaml, and that from the types in core/bamboo_core/job/; change those. -->

`{kind}`, `{group}/{version}`; `kubectl get {short}` for short. `bamboo run`, `bamboo validate` and the
operator read the same manifest by the same rules. The smallest one:

```yaml
apiVersion: {group}/{version}
kind: {kind}
metadata: {{name: example}}
spec:
  task: {{entrypoint: "bamboo_trainer.models.mlp:build"}}
  training: {{steps: 100, globalBatchSize: 64, microBatchSize: 8}}
  topology: {{stages: 2}}
```

Unknown fields are refused; null counts as absent. A number in brackets behind "text" is the maximum length. To change
a field that cannot change, create a new job.
"""


def page(crd: Schema, whole: bool = False) -> str:
    """Return the page in Markdown. whole: the site's version, which also describes the status and kubectl's columns."""
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    words = {"kind": names["kind"], "group": crd["spec"]["group"], "version": version["name"]}
    parts = [HEAD.format(**words, short=names["shortNames"][0])]
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    parts += _sections("spec", spec)
    if not whole:
        return "\n".join([*parts, "## status", "", status["description"] + SHORT, "", *_names("status", status), ""])
    return "\n".join([*parts, *_sections("status", status), _columns(version)])


def _names(path: str, schema: Schema) -> Iterator[str]:
    """Yield a list item for each object, with the names of its fields."""
    yield f"- `{path}`: {', '.join(f'`{name}`' for name in schema['properties'])}"
    for name, field in schema["properties"].items():
        inner = field.get("items", field)
        if "properties" in inner:
            yield from _names(f"{path}.{name}" + ("[]" if "items" in field else ""), inner)


def _sections(path: str, schema: Schema) -> Iterator[str]:
    """Yield a section about an object's fields, then one for each object inside it, in the order of the schema.

    Only a top-level section begins with its object's description; an inner object's is in the table of its parent.
    """
    lines = [f"{'#' * (2 if '.' not in path else 3)} {path}", ""]
    lines += [schema["description"], ""] if "." not in path else []
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else _default(field)
        kind = _type(field, _anchor(f"{path}.{name}"))
        if path.startswith("status"):  # which nobody but the operator writes
            default, kind = "", re.sub(r"^(text|integer|number)\b.*", r"\1", kind)
        rows.append((f"`{name}`", kind, default, _cell(field["description"])))
    defaults = any(default for _, _, default, _ in rows)
    lines += ["| Field | Type | Default | What |", "| --- | --- | --- | --- |"] if defaults else []
    lines += [] if defaults else ["| Field | Type | What |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(row if defaults else (*row[:2], row[3]))} |" for row in rows]
    rules = list(_rules(path, schema.get("x-kubernetes-validations", ())))
    yield "\n".join([*lines, *(["", "Expected:", "", *rules] if rules else []), ""])
    for name, field in schema["properties"].items():
        inner, at = field.get("items", field), f"{path}.{name}" + ("[]" if "items" in field else "")
        if "properties" in inner:
            yield from _sections(at, inner)


def _rules(path: str, rules: Sequence[Schema]) -> Iterator[str]:
    """Yield a list item for each validation message, except SAID_OF_FIELDS, with the fields that it concerns."""
    fields: dict[str, list[str]] = {}
    for rule in rules:
        fields.setdefault(rule["message"], []).append(f"`{path}{rule.get('fieldPath', '')}`")
    for message, of in fields.items():
        if message in SAID_OF_FIELDS:
            continue
        yield f"- {', '.join(of)}: {message.removeprefix('expected ')}."


def _default(field: Schema) -> str:
    default = field.get("default", {})
    return "" if default == {} else f"`{yaml.safe_dump(default).splitlines()[0]}`"


def _anchor(path: str) -> str:
    return "#" + re.sub(r"\W", "", path).lower()


def _type(field: Schema, section: str) -> str:
    kind = field.get("type", "quantity")
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if kind == "array":
        least = f"{field['minItems']} to " if "minItems" in field else "at most "
        return f"list of {least}{field['maxItems']}: {_type(field['items'], section)}"
    if "x-kubernetes-preserve-unknown-fields" in field.get("additionalProperties", {}):
        return "any object"
    if "additionalProperties" in field:
        return f"map of at most {field['maxProperties']}: {_type(field['additionalProperties'], section)}"
    if "x-kubernetes-preserve-unknown-fields" in field:
        return "any object"
    if field.get("format") == "date-time":
        return "time"
    if "properties" in field:
        return f"[object]({section})"
    return ("text" if kind == "string" else kind) + _bounds(field)


def _bounds(field: Schema) -> str:
    if "maxLength" in field:
        return f" ({field['maxLength']})"
    low, high = field.get("minimum"), field.get("maximum", MAX_INT)
    least = "more than" if field.get("exclusiveMinimum") else "at least"
    if high == MAX_INT:
        return "" if low is None else f", {least} {low}"
    return f", {least} {low}, at most {high}" if field.get("exclusiveMinimum") else f" from {low} to {high}"


def _columns(version: Schema) -> str:
    lines = [
        "## Columns of `kubectl get`",
        "",
        "Those from Samples/s on only with `-o wide`.",
        "",
        "| Column | Field |",
        "| --- | --- |",
    ]
    for column in sorted(version["additionalPrinterColumns"], key=lambda column: column.get("priority", 0)):
        lines.append(f"| {column['name']} | `{column['jsonPath']}` |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    PAGE.write_text(page(yaml.safe_load(CRD.read_text())))
