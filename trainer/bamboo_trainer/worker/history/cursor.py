"""The position of a follower in a history."""

from collections.abc import Sequence
from typing import Self

import msgspec

from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The records that a logger or a callback was given: steps up to this one, evaluations up to that (attempt, step),
    and of each source the events up to that number.
    """

    attempt: int = 0
    step: int = 0
    evaluated: tuple[int, int] = (0, -1)
    events: dict[str, int] = {}

    def has(self, record: Record) -> bool:
        match record:
            case StepRecord():
                return (record.attempt, record.step) <= (self.attempt, self.step)
            case EvaluationRecord():
                return (record.attempt, record.step) <= self.evaluated
        return record.number <= self.events.get(record.source, 0)

    def after(self, records: Sequence[Record]) -> Self:
        attempt, step, evaluated, events = self.attempt, self.step, self.evaluated, dict(self.events)
        for record in records:
            match record:
                case StepRecord():
                    attempt, step = max((attempt, step), (record.attempt, record.step))
                case EvaluationRecord():
                    evaluated = max(evaluated, (record.attempt, record.step))
                case EventRecord():
                    events[record.source] = max(record.number, events.get(record.source, 0))
        return msgspec.structs.replace(self, attempt=attempt, step=step, evaluated=evaluated, events=events)
