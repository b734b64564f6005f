"""An installation's own marks on nodes that go: a taint, label, annotation or condition that its people or tools set.

They are read from a file, once, beside those of the clouds (`cloud_marks`), and hold for all jobs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bamboo.job.fields import Fields, ManifestError, Problem
from bamboo.job.text_patterns import LABEL_KEY, TextPattern
from bamboo.job.yaml_file import load_document
from bamboo_operator.cluster.cloud_marks import DisruptionMark

MOST_MARKS = 100
FIELD = "nodeMarks"
REASON = TextPattern(
    said="a word in CamelCase such as RackMaintenance, of at most 63 letters and digits",
    pattern=re.compile(r"[A-Z][A-Za-z0-9]*", re.ASCII),
    most=63,
)
VALUE = TextPattern(said="a text of at most 253 characters", pattern=re.compile(r".*", re.DOTALL))


class MarkField(StrEnum):
    """Where on the node it is: the field of the mark that says what it looks like."""

    TAINT = "taint"
    LABEL = "label"
    ANNOTATION = "annotation"
    CONDITION = "condition"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMark:
    """key: of taint, label or annotation, or the condition's type. value: None for any; of a condition, its status.

    reason: of a condition; None for any.
    """

    place: MarkField
    key: str
    value: str | None
    mark: DisruptionMark
    reason: str | None = None

    def on(self, node: Mapping[str, Any]) -> bool:
        """Has the node this mark?"""
        found = _values(node, self.place, self.key, self.reason)
        return any(self.value in (None, value) for value in found)


def read_marks(path: Path) -> tuple[NodeMark, ...]:
    """The marks in that YAML or JSON file, whose only field is nodeMarks. Raises ManifestError with all mistakes."""
    problems: list[Problem] = []
    fields = Fields(load_document(str(path)), "", problems)
    found = fields.items(FIELD, _mark, most=MOST_MARKS)
    fields.close()
    if problems:
        raise ManifestError(*problems)
    return found


def _mark(f: Fields) -> NodeMark:
    reason = f.text("reason", REASON)
    places = [place for place in MarkField if f.has(place)]
    seconds, gone = f.optional_positive("noticeSeconds"), f.flag("gone")
    if len(places) != 1:
        f.problem("", f"expected exactly one of {', '.join(MarkField)}, got {' and '.join(places) or 'none'}")
    if f.has("noticeSeconds") == gone:
        f.problem("", f"expected noticeSeconds or gone: true, got {'both' if gone else 'neither'}")
    place = places[0] if places else MarkField.TAINT
    inner = f.child(place) if places else Fields({"key": "x"}, "", [])
    is_condition = place is MarkField.CONDITION
    key = inner.text("type" if is_condition else "key", LABEL_KEY)
    if is_condition:
        value: str | None = inner.choice("status", ConditionStatus.TRUE)
    else:
        value = inner.optional_text("value", VALUE)
    why = inner.optional_text("reason", VALUE) if is_condition else None
    inner.close()
    mark = DisruptionMark(reason, f"has the {place} {key}", None if gone else seconds)
    return f.closed(NodeMark(place=place, key=key, value=value, mark=mark, reason=why))


def _values(node: Mapping[str, Any], place: MarkField, key: str, reason: str | None) -> Iterator[str]:
    """Those that the key has on the node."""
    metadata = node.get("metadata") or {}
    match place:
        case MarkField.TAINT:
            taints = (node.get("spec") or {}).get("taints") or ()
            yield from (str(t.get("value") or "") for t in taints if t.get("key") == key)
        case MarkField.CONDITION:
            for condition in (node.get("status") or {}).get("conditions") or ():
                if condition.get("type") == key and reason in (None, condition.get("reason")):
                    yield str(condition.get("status"))
        case MarkField.LABEL | MarkField.ANNOTATION:
            table = metadata.get("labels" if place is MarkField.LABEL else "annotations") or {}
            if key in table:
                yield str(table[key])
