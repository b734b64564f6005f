"""The position of a reader of a history's records."""

from collections.abc import Sequence
from typing import Final, Self, TypeVar

import msgspec

from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord

VERSION: Final = 2  # of `Reached`


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """The records that a logger or a callback was given: steps up to this one, evaluations up to that (attempt, step),
    and of each source the events up to that number. version: 1 counted steps from 0, and had an evaluation in the step
    after it.
    """

    attempt: int = 0
    step: int = 0
    evaluated: tuple[int, int] = (0, -1)
    events: dict[str, int] = {}
    version: int = 1

    def has(self, record: Record) -> bool:
        match record:
            case StepRecord():
                return (record.attempt, record.step) <= (self.attempt, self.step)
            case EvaluationRecord():
                return (record.attempt, record.step) <= self.evaluated
            case EventRecord():
                return record.number <= self.events.get(record.source, 0)
        return (record.attempt, record.last) <= (self.attempt, self.step)

    def after(self, records: Sequence[Record]) -> Self:
        attempt, step, evaluated, events = self.attempt, self.step, self.evaluated, dict(self.events)
        for record in records:
            if isinstance(record, StepRecord):
                attempt, step = max((attempt, step), (record.attempt, record.step))
            elif isinstance(record, EvaluationRecord):
                evaluated = max(evaluated, (record.attempt, record.step))
            elif isinstance(record, EventRecord):
                events[record.source] = max(record.number, events.get(record.source, 0))
        return msgspec.structs.replace(
            self, attempt=attempt, step=step, evaluated=evaluated, events=events, version=VERSION
        )


Kind = TypeVar("Kind", bound=Reached)


def reached(data: bytes, kind: type[Kind]) -> Kind:
    """Return the position saved by any version; without data, the beginning."""
    found = msgspec.json.decode(data, type=kind) if data else kind(version=VERSION)
    if found.version > 1:
        return found
    return msgspec.structs.replace(found, step=found.step + 1, evaluated=(found.attempt, found.step), version=VERSION)
