"""The records of the job's history that a worker knows, and how much of them is written. Pure but for its own state."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from bamboo_core.control.protocol import HistoryEvents
from bamboo_core.history.gaps import NOT_RECORDED, holes, without
from bamboo_core.history.records import EvaluationRecord, EventRecord, GapRecord, Record, StepRecord
from bamboo_trainer.frames.payloads import Commit, HistoryMark, Unwritten

MOST_KEPT: Final = 10_000  # steps, and as many events; beyond that, the oldest are dropped
TOLD_AT_ONCE: Final = 1000  # steps, in one piece


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """batch: samples of a step. tokens: of a sample; None if unknown."""

    batch: int
    tokens: int | None = None


class HistoryBuffer:
    """Steps by (origin, step), until they are known to be written. attempt: 0 while it is unknown.

    Steps are counted as in the history: after step 1 one is committed. All steps of an origin from its first one on are
    written, or recorded as a gap, up to a certain step, which only grows. The root sends that step with each commit,
    and only steps up to it are forgotten: a root that joined late may have written steps 801 to 900, which does not
    mean that steps 1 to 800, known to others, are written. The evaluation of the state after a step comes with the
    commit of the next one, and is written with it.

    It has no lock: users that share it have one.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._steps: dict[tuple[int, int], StepRecord] = {}
        self._evaluations: dict[tuple[int, int], EvaluationRecord] = {}
        self._events: dict[tuple[str, int], EventRecord] = {}
        self._attempts: dict[int, int] = {}  # by origin
        self._before: dict[int, int] = {}  # by origin: the one whose attempt it continues
        self._first: dict[int, int] = {}  # by origin: the step after which it began
        self._written: dict[int, int] = {}  # by origin: steps up to that one
        self._beyond: dict[tuple[int, int], float] = {}  # attempt, step: time of what is written above all that
        self._told_gaps: list[tuple[int, int, int]] = []  # the same of gaps: attempt, first, last
        self._known: dict[tuple[type, int, float], None] = {}  # kind, step and time of records in the history
        self._known_events: dict[str, int] = {}  # by source: the newest in the history

    # what happens

    def began(self, origin: int, first: int) -> None:
        """Note that the workers' states of that origin began after that step."""
        self._first.setdefault(origin, first)

    def committed(self, origin: int, done: int, commit: Commit) -> None:
        """Keep a commit's records. done: the number of steps committed before."""
        if commit.history is None:
            return
        self._learn(origin, commit.history)
        for record in self._records(done, commit, commit.history):
            self._keep(origin, record)

    def heard(self, records: Unwritten) -> None:
        for origin, record in records:
            if record.attempt:
                self._know(origin, record.attempt)
            self._keep(origin, record)

    def happened(self, message: HistoryEvents) -> None:
        for event in message.events:
            record = EventRecord(
                attempt=0,
                time=event.time,
                reason=event.reason,
                message=event.message,
                warning=event.warning,
                source=message.source,
                number=event.number,
            )
            if event.number > self._known_events.get(message.source, 0):
                self._events.setdefault((message.source, event.number), record)
        while len(self._events) > MOST_KEPT:
            del self._events[next(iter(self._events))]

    def moved(self, origin: int) -> None:
        """Note a new origin without a step back: the attempt continues."""
        before = [one for one in self._first if one < origin]
        if before:
            self._before.setdefault(origin, max(before))

    # what is known

    def written_up_to(self, origin: int) -> int:
        """Return the step up to which all steps of that origin are known to be written. 0: none is."""
        return self._written.get(origin, 0)

    def unread_up_to(self, origin: int) -> int:
        """Return the step up to which files of the history are of no use to that origin's root."""
        return min([self._up_to(origin), *(step - 1 for _, step in self._steps)])

    def unwritten(self) -> list[Unwritten]:
        """Return the unwritten records in pieces, with the attempt, where known."""
        records: Unwritten = [
            (origin, msgspec.structs.replace(record, attempt=self.attempt(origin)))
            for origin, record in self._in_order()
        ]
        return [records[at : at + TOLD_AT_ONCE] for at in range(0, len(records), TOLD_AT_ONCE)]

    def attempt(self, origin: int) -> int:
        while origin not in self._attempts and origin in self._before:
            origin = self._before[origin]  # whose attempt may become known after that
        return self._attempts.get(origin, 0)

    def recognize(self, records: Iterable[Record]) -> None:
        """Learn the attempt of an origin from records of the history that are also here."""
        attempts = {(record.step, record.time): record.attempt for record in records if isinstance(record, StepRecord)}
        for (origin, step), record in self._steps.items():
            if (attempt := attempts.get((step, record.time))) is not None:
                self._know(origin, attempt)

    def number_attempts(self, origin: int, newest: int) -> int:
        """Number the attempt of that origin, and earlier ones with records to write; return that origin's number.

        newest: in the history; others may have been announced, and not written yet. If that origin's number is known,
        the remaining records of others belong to no later attempt.
        """
        if self.attempt(origin):
            return self.attempt(origin)
        next_one = max([newest, *self._attempts.values()]) + 1
        for one in (*self.unknown_before(origin), origin):
            self._know(one, next_one)
            next_one += 1
        return self.attempt(origin)

    def unknown_before(self, origin: int) -> list[int]:
        """Return earlier origins with records to write and an unknown attempt, in order; one for each attempt."""
        waiting = sorted({one for one, _ in self._in_order() if one < origin and not self.attempt(one)})
        return [one for one in waiting if self._before.get(one) not in waiting and one not in self._line(origin)]

    def _line(self, origin: int) -> set[int]:
        """Return that origin, and those whose attempt it continues."""
        line = {origin}
        while origin in self._before:
            origin = self._before[origin]
            line.add(origin)
        return line

    def pending(self, origin: int, *, informed: bool) -> tuple[Record, ...]:
        """Return the records that the root of that origin must write, with their attempts. informed: all others have
        sent what they know, so a step that is still unknown is lost, and a gap.
        """
        now = self.attempt(origin)
        steps = [
            _of(record, self._of_origin(one, origin))
            for one, record in self._in_order()
            if one <= origin  # a later one has begun while this one was written
        ]
        gaps = self._gaps(origin) if informed else []
        return (*gaps, *steps, *(_of(event, now) for event in self._events.values()))

    def written(self, origin: int, records: Sequence[Record]) -> dict[str, int]:
        """Note records as written; return the newest event of each source among them.

        The same records, sent later by a worker that does not know this, are ignored.
        """
        events: dict[str, int] = {}
        self._known |= {_kind(record): None for record in records if isinstance(record, StepRecord | EvaluationRecord)}
        for old in list(self._known)[: max(0, len(self._known) - MOST_KEPT)]:
            del self._known[old]
        steps = {(record.attempt, record.step): record.time for record in records if isinstance(record, StepRecord)}
        for key in [key for key in self._steps if (self._of_origin(key[0], origin), key[1]) in steps]:
            del self._steps[key]
        evaluated = {(record.attempt, record.step) for record in records if isinstance(record, EvaluationRecord)}
        for key in [key for key in self._evaluations if (self._of_origin(key[0], origin), key[1]) in evaluated]:
            del self._evaluations[key]
        for record in records:
            if isinstance(record, EventRecord):
                self._events.pop((record.source, record.number), None)
                events[record.source] = max(record.number, events.get(record.source, 0))
                self._known_events[record.source] = max(record.number, self._known_events.get(record.source, 0))
        self._beyond |= steps
        self._told_gaps += [(gap.attempt, gap.first, gap.last) for gap in records if isinstance(gap, GapRecord)]
        self._advance(origin)
        return events

    def _in_order(self) -> list[tuple[int, StepRecord | EvaluationRecord]]:
        """Return records by origin and step; an evaluation follows its state's step, before the step it came with."""
        found: list[tuple[tuple[int, int], StepRecord | EvaluationRecord]] = []
        found += self._steps.items()
        found += self._evaluations.items()
        found.sort(key=lambda item: (*item[0], isinstance(item[1], EvaluationRecord)))
        return [(origin, record) for (origin, _), record in found]

    def _up_to(self, origin: int) -> int:
        return self._written.get(origin, self._first.get(origin, 0))

    def _advance(self, origin: int) -> None:
        """Extend the written range by all that follows it without a break."""
        attempt, last = self.attempt(origin), self._up_to(origin)
        while True:
            if (attempt, last + 1) in self._beyond:
                last += 1
                continue
            ends = [end for one, first, end in self._told_gaps if one == attempt and first <= last + 1 <= end]
            if not ends:
                break
            last = max(ends)
        if last > self._up_to(origin):
            self._written[origin] = last
        self._beyond = {key: time for key, time in self._beyond.items() if key > (attempt, last)}
        self._told_gaps = [gap for gap in self._told_gaps if (gap[0], gap[2]) > (attempt, last)]

    def _gaps(self, origin: int) -> list[Record]:
        """Return gaps for the unknown steps of that origin before known ones."""
        attempt = self.attempt(origin)
        known = {step: time for (one, step), time in self._beyond.items() if one == attempt}
        known |= {step: record.time for (one, step), record in self._steps.items() if one == origin}
        in_gaps = [step for one, first, last in self._told_gaps if one == attempt for step in range(first, last + 1)]
        return [
            GapRecord(attempt=attempt, time=known[last + 1], first=first, last=last, message=NOT_RECORDED)
            for missing in holes(known, self._up_to(origin) + 1)
            for first, last in without(missing, in_gaps)
        ]

    def _of_origin(self, one: int, now: int) -> int:
        """Return the attempt of an origin; if unknown, that before the attempt of `now`. 0: it began after `now`, and
        is unknown.
        """
        if one < now:
            return self.attempt(one) or max(1, self.attempt(now) - 1)
        return self.attempt(one)

    def _know(self, origin: int, attempt: int) -> None:
        """Set the attempt of that origin, and of those that it continues."""
        for one in self._line(origin):
            self._attempts.setdefault(one, attempt)

    def _learn(self, origin: int, mark: HistoryMark) -> None:
        if mark.attempt:
            self._know(origin, mark.attempt)
        if mark.written > self._up_to(origin):
            self._written[origin] = mark.written
            for key in [key for key in self._steps if key <= (origin, mark.written)]:
                del self._steps[key]
            for key in [key for key in self._evaluations if key < (origin, mark.written)]:
                del self._evaluations[key]
            self._advance(origin)

    def _keep(self, origin: int, record: StepRecord | EvaluationRecord) -> None:
        if _kind(record) in self._known:
            return
        match record:
            case StepRecord():
                if record.step > self._up_to(origin):
                    self._steps.setdefault((origin, record.step), record)
                if len(self._steps) > MOST_KEPT:
                    del self._steps[min(self._steps)]  # a gap, if no other worker knows it
            case EvaluationRecord():
                if record.step >= self._up_to(origin):  # the commit that it came with is beyond
                    self._evaluations.setdefault((origin, record.step), record)
                if len(self._evaluations) > MOST_KEPT:
                    del self._evaluations[min(self._evaluations)]

    def _records(self, done: int, commit: Commit, mark: HistoryMark) -> Iterator[StepRecord | EvaluationRecord]:
        """Yield a commit's records. done: the number of steps committed before."""
        if commit.evaluation:
            yield EvaluationRecord(attempt=0, step=done, time=mark.at, metrics=_finite_ones(commit.evaluation))
        if not commit.microbatches:
            return  # the job is over; this was the evaluation of its last state
        rates, step, seconds = self._rates, done + 1, mark.seconds or None
        tokens = None if rates.tokens is None else rates.tokens * rates.batch
        yield StepRecord(
            attempt=0,
            step=step,
            time=mark.at,
            loss=_finite(commit.loss),
            gradient_norm=_finite(commit.norm),
            learning_rate=mark.rate,
            seconds=seconds,
            samples=step * rates.batch,
            samples_per_second=rates.batch / seconds if seconds else None,
            tokens=None if tokens is None else step * tokens,
            tokens_per_second=tokens / seconds if tokens and seconds else None,
            skipped=commit.skipped,
            checkpoint=commit.checkpoint is not None,
            metrics=_finite_ones(commit.metrics),
        )


def _kind(record: StepRecord | EvaluationRecord) -> tuple[type, int, float]:
    return type(record), record.step, record.time


def _finite_ones(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in numbers.items()}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _of(record: Record, attempt: int) -> Record:
    return msgspec.structs.replace(record, attempt=attempt)
