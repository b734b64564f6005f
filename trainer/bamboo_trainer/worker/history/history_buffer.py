"""The newest commits known to a worker and perhaps not yet to the job's history, as records of that history."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from bamboo_core.control.protocol import HistoryEvents
from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord
from bamboo_core.planning.plan import Plan
from bamboo_trainer.frames.payloads import Commit, Commits, CommonState, HistoryMark

MOST_KEPT: Final = 10_000  # commits, and as many events; beyond that, the oldest are dropped
SENT_AT_ONCE: Final = 1000  # commits, in one frame


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a step's data. batch: samples of a step. tokens: of a sample; None if unknown."""

    batch: int
    tokens: int | None = None


class HistoryBuffer:
    """The newest commits and events, not yet in the history. Every worker has one, so a lost root takes no step along.

    Commits are named by the number of steps before them. written: the history has all commits before that one; the root
    sends the number with each commit. attempt: of the job; 0: unknown. It has no lock.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._commits: dict[int, Commit] = {}
        self._events: dict[tuple[str, int], EventRecord] = {}
        self._origin = self._first = 0  # first: the step with which the attempt began
        self.attempt = self.written = 0

    # events

    def obey(self, plan: Plan) -> None:
        """Forget the commits of steps that are repeated, if the states start from an earlier step."""
        if plan.origin == self._origin:
            return
        self._origin, self.written = plan.origin, min(self.written, plan.first_step)
        self._commits = {step: commit for step, commit in self._commits.items() if step < plan.first_step}
        if not plan.moved:
            self._first, self.attempt = plan.first_step, 0

    def committed(self, step: int, commit: Commit) -> None:
        """Keep a commit, and learn from its mark."""
        if commit.history is not None:
            self.attempt = commit.history.attempt or self.attempt
            self._forget(commit.history.written)
            self.heard([(step, commit)])

    def heard(self, commits: Commits) -> None:
        """Keep commits that another worker does not know to be in the history."""
        for step, commit in commits:
            if commit.history is not None and step >= self.written:
                self._commits.setdefault(step, msgspec.structs.replace(commit, common=CommonState()))
        while len(self._commits) > MOST_KEPT:
            del self._commits[min(self._commits)]

    def happened(self, message: HistoryEvents) -> None:
        for event in message.events:
            self._events[message.source, event.number] = EventRecord(
                attempt=0,
                time=event.time,
                reason=event.reason,
                message=event.message,
                warning=event.warning,
                source=message.source,
                number=event.number,
            )
        while len(self._events) > MOST_KEPT:
            del self._events[next(iter(self._events))]

    def wrote(self, written: int, events: Mapping[str, int]) -> None:
        """Forget what is in the history: the commits before that one, and each source's events up to that number."""
        self._forget(written)
        self._events = {key: event for key, event in self._events.items() if key[1] > events.get(key[0], 0)}

    def _forget(self, written: int) -> None:
        if written > self.written:
            self.written = written
            self._commits = {step: commit for step, commit in self._commits.items() if step >= written}

    # queries

    @property
    def newest_attempt(self) -> int:
        """The newest attempt that a kept commit belongs to; 0 if none is known."""
        return max((commit.history.attempt for commit in self._commits.values() if commit.history), default=0)

    def knows(self, records: Sequence[Record]) -> bool:
        """Return whether one of these records is of a kept commit of this attempt."""
        times = {step + 1: commit.history.at for step, commit in self._commits.items() if commit.history}
        steps = [record for record in records if isinstance(record, StepRecord) and record.step > self._first]
        return any(times.get(record.step) == record.time for record in steps)

    def unwritten(self) -> list[Commits]:
        """Return the kept commits in pieces."""
        commits = sorted(self._commits.items())
        return [commits[at : at + SENT_AT_ONCE] for at in range(0, len(commits), SENT_AT_ONCE)]

    def pending(self, attempt: int) -> tuple[list[Record], int, dict[str, int]]:
        """Return all records to write, and what to pass to `wrote` afterwards. attempt: the current one."""
        commits = sorted(self._commits.items())
        records: list[Record] = []
        for step, commit in commits:
            if commit.history is not None:
                records += self._records(step, commit, commit.history, attempt)
        newest: dict[str, int] = {}
        for source, number in self._events:
            newest[source] = max(number, newest.get(source, 0))
        records += [msgspec.structs.replace(event, attempt=attempt) for event in self._events.values()]
        return records, commits[-1][0] + 1 if commits else 0, newest

    def _records(self, done: int, commit: Commit, mark: HistoryMark, attempt: int) -> Iterator[Record]:
        """Yield a commit's records. done: the number of steps committed before."""
        attempt = mark.attempt or (attempt if done >= self._first else max(1, attempt - 1))
        if commit.evaluation:
            yield EvaluationRecord(attempt=attempt, step=done, time=mark.at, metrics=_finite_ones(commit.evaluation))
        if not commit.microbatches:
            return  # the job is over; this was the evaluation of its last state
        rates, step, seconds = self._rates, done + 1, mark.seconds or None
        tokens = None if rates.tokens is None else rates.tokens * rates.batch
        yield StepRecord(
            attempt=attempt,
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


def _finite_ones(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in numbers.items()}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
