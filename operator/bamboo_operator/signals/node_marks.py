"""An installation's own marks of nodes that will go away: taints, labels, annotations or conditions that its tools set.

The operator reads them once from a file and heeds them for all jobs, in addition to the clouds' marks (`cloud_marks`).
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


PLACES = ("taint", "label", "annotation", "condition")  # the fields of a node that can carry a mark


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


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
class NodeMark:
    """A mark that announces that a node will go away or, with `gone`, is gone. Exactly one field in PLACES is set."""

    reason: Annotated[str, REASON]
    notice_seconds: Annotated[float | None, Number()] = None
    gone: bool = False
    taint: _KeyAndValue | None = None
    label: _KeyAndValue | None = None
    annotation: _KeyAndValue | None = None
    condition: _Condition | None = None

    @property
    def mark(self) -> DisruptionMark:
        (place,) = (place for place in PLACES if getattr(self, place) is not None)
        key = self.condition.type if self.condition else getattr(self, place).key
        return DisruptionMark(self.reason, f"has the {place} {key}", None if self.gone else self.notice_seconds)

    def on(self, node: Mapping[str, Any]) -> bool:
        """Return whether the node has this mark."""
        metadata, spec, status = (node.get(part) or {} for part in ("metadata", "spec", "status"))
        if (sought := self.condition) is not None:
            return any(
                one.get("type") == sought.type
                and str(one.get("status")) == sought.status
                and sought.reason in (None, one.get("reason"))
                for one in status.get("conditions") or ()
            )
        taints = ((taint.get("key"), taint.get("value") or "") for taint in spec.get("taints") or ())
        labels, annotations = ((metadata.get(name) or {}).items() for name in ("labels", "annotations"))
        return any(
            wanted is not None and key == wanted.key and wanted.value in (None, str(value))
            for wanted, pairs in ((self.taint, taints), (self.label, labels), (self.annotation, annotations))
            for key, value in pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MarkFile:
    node_marks: Annotated[tuple[NodeMark, ...], ListOf(MOST_MARKS)] = ()


def read_marks(path: Path) -> tuple[NodeMark, ...]:
    """Read the marks in a YAML or JSON file, whose only field is nodeMarks. Raises ManifestError with all mistakes."""
    problems: list[Problem] = []
    read: list[ReadObject] = []
    file: _MarkFile = read_object(_MarkFile, Fields(load_document(str(path)), "", problems), read)
    marks = (one for one in read if isinstance(one.value, NodeMark))
    sound = (mark for mark in marks if not any(problem.path.startswith(mark.path) for problem in problems))
    if mistakes := [*(mistake for mark in sound for mistake in _mistakes(mark)), *problems]:
        raise ManifestError(*mistakes)
    return file.node_marks


def _mistakes(mark: ReadObject) -> Iterator[Problem]:
    """Yield a problem for each broken rule: exactly one of PLACES, and exactly one of noticeSeconds and gone."""
    places = [place for place in PLACES if place in mark.given]
    if len(places) != 1:
        got = " and ".join(places) or "none"
        yield Problem(mark.path, f"expected exactly one of {', '.join(PLACES)}, got {got}")
    gone = mark.value.gone
    if ("noticeSeconds" in mark.given) == gone:
        yield Problem(mark.path, f"expected noticeSeconds or gone: true, got {'both' if gone else 'neither'}")
