"""What a worker knows of the job's history, and how much of it is written. Pure but for its own state."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from bamboo.control.protocol import HistoryEvents
from bamboo.history.records import EventRecord, GapRecord, Record, StepRecord
from bamboo_trainer.transport.payloads import Commit, HistoryMark, Unwritten

MOST_KEPT: Final = 10_000  # steps, and as many events; of more, the oldest are given up
TOLD_AT_ONCE: Final = 5000  # steps, to a new root


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """batch: samples of a step. tokens: of a sample; None if the data set does not say."""

    batch: int
    tokens: int | None = None


class HistoryBuffer:
    """Steps by (origin, step), until they are known to be written. attempt: 0 while it is not known.

    It has no lock: who shares it has one.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._steps: dict[tuple[int, int], StepRecord] = {}
        self._events: dict[tuple[str, int], EventRecord] = {}
        self._gaps: list[tuple[int, GapRecord]] = []  # by origin
        self._attempts: dict[int, int] = {}  # by origin
        self._written: dict[int, int] = {}  # by origin: steps below
        self._known: dict[tuple[int, float], None] = {}  # step and time of records that are in the history
        self._known_events: dict[str, int] = {}  # by source: the newest that is

    # what happens

    def committed(self, origin: int, step: int, commit: Commit) -> None:
        if commit.history is None:
            return
        self._learn(origin, commit.history)
        if step >= self._written.get(origin, 0):
            self._keep(origin, self._record(step, commit, commit.history))

    def heard(self, records: Unwritten) -> None:
        for origin, record in records:
            if record.attempt:
                self._attempts.setdefault(origin, record.attempt)
            if record.step >= self._written.get(origin, 0):
                self._keep(origin, record)

    def happened(self, message: HistoryEvents) -> None:
        for event in message.events:
            record = EventRecord(
                attempt=0, time=event.time, reason=event.reason, message=event.message, warning=event.warning,
                source=message.source, number=event.number,
            )  # fmt: skip
            if event.number > self._known_events.get(message.source, 0):
                self._events.setdefault((message.source, event.number), record)
        while len(self._events) > MOST_KEPT:
            del self._events[next(iter(self._events))]

    def moved(self, origin: int) -> None:
        """A new origin without a step back: the attempt goes on."""
        before = [one for one in self._attempts if one < origin]
        if before:
            self._attempts.setdefault(origin, self._attempts[max(before)])

    # what is known

    def written_below(self, origin: int) -> int:
        """Steps of that origin below it are known to be written."""
        return self._written.get(origin, 0)

    def unwritten(self) -> Unwritten:
        """With the attempt, as far as it is known."""
        newest = sorted(self._steps.items())[-TOLD_AT_ONCE:]
        return [
            (origin, msgspec.structs.replace(record, attempt=self.attempt(origin))) for (origin, _), record in newest
        ]

    def attempt(self, origin: int) -> int:
        return self._attempts.get(origin, 0)

    def recognize(self, records: Iterable[Record]) -> None:
        """Records of the history that are also here tell which attempt an origin is."""
        found = {(record.step, record.time): record.attempt for record in records if isinstance(record, StepRecord)}
        for (origin, step), record in self._steps.items():
            if (attempt := found.get((step, record.time))) is not None:
                self._attempts.setdefault(origin, attempt)

    def number_attempts(self, origin: int, newest: int) -> int:
        """Of that origin, and of those before it of which something is to be written. newest: that is in the history;
        others may have been told of, and not written yet.
        """
        next_one = max([newest, *self._attempts.values()]) + 1
        waiting = {one for one, _ in self._steps if one < origin}
        for one in (*sorted(waiting), origin):
            if one not in self._attempts:
                self._attempts[one] = next_one
                next_one += 1
        return self._attempts[origin]

    def pending(self, origin: int) -> tuple[Record, ...]:
        """What is to be written by the root of that origin, each with its attempt."""
        now = self._attempts.get(origin, 0)
        steps = [_of(record, self._of_origin(one, origin)) for (one, _), record in sorted(self._steps.items())]
        gaps = [_of(gap, self._of_origin(one, origin)) for one, gap in self._gaps]
        return (*gaps, *steps, *(_of(event, now) for event in self._events.values()))

    def written(self, origin: int, records: Sequence[Record]) -> dict[str, int]:
        """These are in the history. The newest event of each source among them.

        Who tells of them once more, as it has not heard that, is not listened to.
        """
        events: dict[str, int] = {}
        self._known |= {(record.step, record.time): None for record in records if isinstance(record, StepRecord)}
        for old in list(self._known)[: max(0, len(self._known) - MOST_KEPT)]:
            del self._known[old]
        steps = {(record.attempt, record.step) for record in records if isinstance(record, StepRecord)}
        gaps = {(record.first, record.last) for record in records if isinstance(record, GapRecord)}
        now = self._attempts.get(origin, 0)
        for key in [key for key in self._steps if (self._of_origin(key[0], origin), key[1]) in steps]:
            del self._steps[key]
        self._gaps = [(one, gap) for one, gap in self._gaps if (gap.first, gap.last) not in gaps]
        for record in records:
            if isinstance(record, EventRecord):
                self._events.pop((record.source, record.number), None)
                events[record.source] = max(record.number, events.get(record.source, 0))
                self._known_events[record.source] = max(record.number, self._known_events.get(record.source, 0))
        mine = [step for attempt, step in steps if attempt == now]
        left = [step for one, step in self._steps if one == origin]
        if mine:
            below = min(left) if left else max(mine) + 1
            self._written[origin] = max(self._written.get(origin, 0), below)
        return events

    def _of_origin(self, one: int, now: int) -> int:
        """The attempt of an origin. One of which nobody has known it is taken for the one before that of now."""
        attempt = self._attempts.get(now, 0)
        return self._attempts.get(one, attempt if one >= now else max(1, attempt - 1))

    def _learn(self, origin: int, mark: HistoryMark) -> None:
        if mark.attempt:
            self._attempts.setdefault(origin, mark.attempt)
        if mark.written > self._written.get(origin, 0):
            self._written[origin] = mark.written
            done = [key for key in self._steps if key < (origin, mark.written)]
            for key in done:
                del self._steps[key]
            self._gaps = [(one, gap) for one, gap in self._gaps if (one, gap.last) >= (origin, mark.written)]

    def _keep(self, origin: int, record: StepRecord) -> None:
        if (record.step, record.time) not in self._known:
            self._steps.setdefault((origin, record.step), record)
        if len(self._steps) > MOST_KEPT:
            lost = min(self._steps)
            self._give_up(lost[0], self._steps.pop(lost))

    def _give_up(self, origin: int, lost: StepRecord) -> None:
        text = "these steps could not be written in time and are not recorded"
        if self._gaps and self._gaps[-1][0] == origin and self._gaps[-1][1].last + 1 == lost.step:
            gap = self._gaps.pop()[1]
            self._gaps.append((origin, msgspec.structs.replace(gap, last=lost.step)))
        else:
            gap = GapRecord(attempt=0, time=lost.time, first=lost.step, last=lost.step, message=text)
            self._gaps.append((origin, gap))

    def _record(self, step: int, commit: Commit, mark: HistoryMark) -> StepRecord:
        rates, trained = self._rates, commit.microbatches > 0
        seconds, done = mark.seconds or None if trained else None, step + trained
        tokens = None if rates.tokens is None else rates.tokens * rates.batch
        return StepRecord(
            attempt=0,
            step=step,
            time=mark.at,
            loss=_finite(commit.loss) if trained else None,
            gradient_norm=_finite(commit.norm) if trained else None,
            learning_rate=mark.rate if trained else None,
            seconds=seconds,
            samples=done * rates.batch,
            samples_per_second=rates.batch / seconds if seconds else None,
            tokens=None if tokens is None else done * tokens,
            tokens_per_second=tokens / seconds if tokens and seconds else None,
            skipped=commit.skipped,
            metrics={name: _finite(value) for name, value in commit.metrics.items()},
            evaluation={name: _finite(value) for name, value in commit.evaluation.items()},
            trained=trained,
        )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _of(record: Record, attempt: int) -> Record:
    return msgspec.structs.replace(record, attempt=attempt)
