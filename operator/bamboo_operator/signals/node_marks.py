"""An installation's own marks of nodes to be taken away: taints, labels, annotations or conditions that its tools set.

They are read once from a file, hold for all jobs, and add to the clouds' marks (`cloud_marks`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from bamboo_core.job.fields import Fields, ManifestError, Problem
from bamboo_core.job.forms import Number
from bamboo_core.job.model import ListOf, ReadObject, read_object
from bamboo_core.job.text_patterns import LABEL_KEY, TextPattern
from bamboo_core.job.yaml_file import load_document
from bamboo_operator.signals.cloud_marks import DisruptionMark

MOST_MARKS = 100
REASON = TextPattern(
    description="a word in CamelCase such as RackMaintenance, of at most 63 letters and digits",
    pattern=re.compile(r"[A-Z][A-Za-z0-9]*", re.ASCII),
    most=63,
)
VALUE = TextPattern(description="a text of at most 253 characters", pattern=re.compile(r".*", re.DOTALL))


class MarkField(StrEnum):
    """The field of a node that carries the mark."""

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
    """A mark that announces the removal of a node."""

    place: MarkField
    key: str  # of a taint, label or annotation, or a condition's type
    value: str | None  # None for any; for a condition, its status
    mark: DisruptionMark
    reason: str | None = None  # for a condition; None for any

    def on(self, node: Mapping[str, Any]) -> bool:
        """Return whether the node has this mark."""
        values = _values(node, self.place, self.key, self.reason)
        return any(self.value in (None, value) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyAndValue:
    key: Annotated[str, LABEL_KEY]
    value: Annotated[str | None, VALUE] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Condition:
    type: Annotated[str, LABEL_KEY]
    status: ConditionStatus = ConditionStatus.TRUE
    reason: Annotated[str | None, VALUE] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenMark:
    """A mark as written in the file, with exactly one field that a `MarkField` names."""

    reason: Annotated[str, REASON]
    notice_seconds: Annotated[float | None, Number()] = None
    gone: bool = False
    taint: _KeyAndValue | None = None
    label: _KeyAndValue | None = None
    annotation: _KeyAndValue | None = None
    condition: _Condition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MarkFile:
    node_marks: Annotated[tuple[_WrittenMark, ...], ListOf(MOST_MARKS)] = ()


def read_marks(path: Path) -> tuple[NodeMark, ...]:
    """Read the marks in a YAML or JSON file, whose only field is nodeMarks. Raises ManifestError with all mistakes."""
    problems: list[Problem] = []
    read: list[ReadObject] = []
    file: _MarkFile = read_object(_MarkFile, Fields(load_document(str(path)), "", problems), read)
    marks = (one for one in read if isinstance(one.value, _WrittenMark))
    sound = (mark for mark in marks if not any(problem.path.startswith(mark.path) for problem in problems))
    if mistakes := [*(mistake for mark in sound for mistake in _mistakes(mark)), *problems]:
        raise ManifestError(*mistakes)
    return tuple(map(_mark, file.node_marks))


def _mistakes(mark: ReadObject) -> Iterator[Problem]:
    """Yield contradictions between the fields of a mark."""
    places = [place for place in MarkField if place in mark.given]
    if len(places) != 1:
        got = " and ".join(places) or "none"
        yield Problem(mark.path, f"expected exactly one of {', '.join(MarkField)}, got {got}")
    gone = mark.value.gone
    if ("noticeSeconds" in mark.given) == gone:
        yield Problem(mark.path, f"expected noticeSeconds or gone: true, got {'both' if gone else 'neither'}")


def _mark(written: _WrittenMark) -> NodeMark:
    (place,) = (place for place in MarkField if getattr(written, place) is not None)
    if (condition := written.condition) is not None:
        key, value = condition.type, str(condition.status)
    else:
        key, value = getattr(written, place).key, getattr(written, place).value
    mark = DisruptionMark(written.reason, f"has the {place} {key}", None if written.gone else written.notice_seconds)
    return NodeMark(place=place, key=key, value=value, mark=mark, reason=condition.reason if condition else None)


def _values(node: Mapping[str, Any], place: MarkField, key: str, reason: str | None) -> Iterator[str]:
    """Yield the values of the key on the node."""
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
