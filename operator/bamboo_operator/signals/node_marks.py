"""An installation's own marks on nodes that go: a taint, label, annotation or condition that its people or tools set.

They are read from a file, once, beside those of the clouds (`cloud_marks`), and hold for all jobs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from bamboo_core.job.fields import Fields, ManifestError, Problem, UnknownField
from bamboo_core.job.forms import Number
from bamboo_core.job.model import ListOf, ReadObject, read_object
from bamboo_core.job.text_patterns import LABEL_KEY, TextPattern
from bamboo_core.job.yaml_file import load_document
from bamboo_operator.signals.cloud_marks import DisruptionMark

MOST_MARKS = 100
REASON = TextPattern(
    said="a word in CamelCase such as RackMaintenance, of at most 63 letters and digits",
    pattern=re.compile(r"[A-Z][A-Za-z0-9]*", re.ASCII),
    most=63,
)
VALUE = TextPattern(said="a text of at most 253 characters", pattern=re.compile(r".*", re.DOTALL))


class MarkField(StrEnum):
    """The field of a node that bears the mark."""

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
    """A mark of a node that says that it goes."""

    place: MarkField
    key: str  # of taint, label or annotation, or the condition's type
    value: str | None  # None for any; of a condition, its status
    mark: DisruptionMark
    reason: str | None = None  # of a condition; None for any

    def on(self, node: Mapping[str, Any]) -> bool:
        """Has the node this mark?"""
        found = _values(node, self.place, self.key, self.reason)
        return any(self.value in (None, value) for value in found)


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
    """A mark as it is in the file, in exactly one of the places that a `MarkField` names."""

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
    """The marks in that YAML or JSON file, whose only field is nodeMarks. Raises ManifestError with all mistakes."""
    problems: list[Problem] = []
    found: list[ReadObject] = []
    file: _MarkFile = read_object(_MarkFile, Fields(load_document(str(path)), "", problems), found)
    wrong = {p.path.removesuffix(f".{p.key}") if isinstance(p, UnknownField) else p.path for p in problems}
    marks = (one for one in found if isinstance(one.value, _WrittenMark) and one.path not in wrong)
    if mistakes := [*(mistake for mark in marks for mistake in _mistakes(mark)), *problems]:
        raise ManifestError(*mistakes)
    return tuple(map(_mark, file.node_marks))


def _mistakes(found: ReadObject) -> Iterator[Problem]:
    """What is wrong between the fields of a mark."""
    places = [place for place in MarkField if place in found.given]
    if len(places) != 1:
        got = " and ".join(places) or "none"
        yield Problem(found.path, f"expected exactly one of {', '.join(MarkField)}, got {got}")
    gone = found.value.gone
    if ("noticeSeconds" in found.given) == gone:
        yield Problem(found.path, f"expected noticeSeconds or gone: true, got {'both' if gone else 'neither'}")


def _mark(said: _WrittenMark) -> NodeMark:
    (place,) = (place for place in MarkField if getattr(said, place) is not None)
    if (condition := said.condition) is not None:
        key, value = condition.type, str(condition.status)
    else:
        key, value = getattr(said, place).key, getattr(said, place).value
    mark = DisruptionMark(said.reason, f"has the {place} {key}", None if said.gone else said.notice_seconds)
    return NodeMark(place=place, key=key, value=value, mark=mark, reason=condition.reason if condition else None)


def _values(node: Mapping[str, Any], place: MarkField, key: str, reason: str | None) -> Iterator[str]:
    """The values that the key has on the node."""
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
