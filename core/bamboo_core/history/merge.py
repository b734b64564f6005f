"""The way from the files of those who have written a history, one after the other, to the history. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bamboo_core.history.gaps import NOT_RECORDED, Range, holes, joined, without
from bamboo_core.history.records import EvaluationRecord, EventRecord, GapRecord, Record, StepRecord


def merged(records: Iterable[Record]) -> list[Record]:
    """Each record once, in the order of attempts, steps and time. Who takes over may have written one a second time.

    A job that has gone back to a checkpoint has several attempts, and steps that are in more than one of them. The gaps
    are those that are left when all files are read: a writer's that another one has not filled, and what nobody has
    told of.
    """
    steps: dict[tuple[int, int], StepRecord] = {}
    evaluations: dict[tuple[int, int], EvaluationRecord] = {}
    events: dict[tuple[str, int], EventRecord] = {}
    told: list[GapRecord] = []
    for record in records:
        match record:
            case StepRecord():
                steps.setdefault((record.attempt, record.step), record)
            case EvaluationRecord():
                evaluations.setdefault((record.attempt, record.step), record)
            case EventRecord():
                events.setdefault((record.source, record.number), record)
            case GapRecord():
                told.append(record)
    gaps = _gaps([steps[key] for key in sorted(steps)], told)
    others: list[EventRecord | GapRecord] = sorted([*events.values(), *gaps], key=lambda record: record.time)
    return _woven(sorted([*steps.values(), *evaluations.values()], key=_place), others)


def _place(record: StepRecord | EvaluationRecord) -> tuple[int, int, bool]:
    """An evaluation comes behind the step whose state it is of."""
    return record.attempt, record.step, isinstance(record, EvaluationRecord)


def newest(records: Iterable[Record]) -> list[Record]:
    """What a reader of the curve wants to see of what `merged` gives: each step and each evaluation as it was done
    last, all events, and the gaps that the curve has.
    """
    records = list(records)
    last = {record.step: id(record) for record in curve(records)}
    begun: dict[int, int] = {}  # the first step of each attempt
    evaluated: dict[int, int] = {}  # the newest attempt that has evaluated the state after a step
    for record in records:
        if isinstance(record, StepRecord):
            begun[record.attempt] = min(record.step, begun.get(record.attempt, record.step))
        elif isinstance(record, EvaluationRecord):
            evaluated[record.step] = max(record.attempt, evaluated.get(record.step, 0))
    seen: list[Record] = []
    for record in records:
        match record:
            case StepRecord():
                seen += [record] if last.get(record.step) == id(record) else []
            case EvaluationRecord():
                done_again = record.step >= min(_begun_later(begun, record.attempt), default=record.step + 1)
                seen += [] if done_again or evaluated[record.step] > record.attempt else [record]
            case GapRecord():
                later = _begun_later(begun, record.attempt)
                end = min([record.last, *(step - 1 for step in later)])  # what comes then has been done again
                left = without((record.first, end), last) if record.first <= end else []
                seen += [msgspec.structs.replace(record, first=one, last=other) for one, other in left]
            case _:
                seen.append(record)
    return seen


def _begun_later(begun: Mapping[int, int], attempt: int) -> list[int]:
    """The first steps of the attempts after that one."""
    return [step for one, step in begun.items() if one > attempt]


def _gaps(steps: Sequence[StepRecord], told: Sequence[GapRecord]) -> list[GapRecord]:
    """The gaps of each attempt: steps that are told to be missing and are not there, and steps missing between or
    before its own.
    """
    present: dict[int, dict[int, float]] = {}
    for record in steps:
        present.setdefault(record.attempt, {})[record.step] = record.time
    since = 1  # the attempt before has come so far
    gaps: list[GapRecord] = []
    for attempt in sorted({*present, *(gap.attempt for gap in told)}):
        there = present.get(attempt, {})
        mine = [gap for gap in told if gap.attempt == attempt]
        missing = [left for gap in mine for left in without((gap.first, gap.last), there)]
        begun = min([*there, *(gap.first for gap in mine)])
        missing += holes(there, min(begun, since))
        gaps += [_gap(attempt, one, there, mine) for one in joined(missing)]
        since = max([*there, *(gap.last for gap in mine)]) + 1
    return gaps


def _gap(attempt: int, missing: Range, there: Mapping[int, float], told: Sequence[GapRecord]) -> GapRecord:
    """The record of a gap, at the time of the first step after it, or as it was told before."""
    first, last = missing
    known = next((gap for gap in told if gap.first <= last and gap.last >= first), None)
    if known is not None:
        return msgspec.structs.replace(known, first=first, last=last)
    return GapRecord(attempt=attempt, time=there[last + 1], first=first, last=last, message=NOT_RECORDED)


def _woven(steps: Sequence[StepRecord | EvaluationRecord], others: Sequence[EventRecord | GapRecord]) -> list[Record]:
    """Steps stay in their order; each of the others comes before the first step that is later."""
    woven: list[Record] = []
    waiting = list(reversed(others))
    for step in steps:
        while waiting and waiting[-1].time <= step.time:
            woven.append(waiting.pop())
        woven.append(step)
    return [*woven, *reversed(waiting)]


def curve(records: Iterable[Record]) -> list[StepRecord]:
    """Each step once: as the newest attempt that has come to it did it. What an attempt has repeated takes the place of
    all that the attempts before it had done from its first step on.
    """
    found: dict[int, StepRecord] = {}
    attempt = 0
    for record in sorted(
        (record for record in records if isinstance(record, StepRecord)), key=lambda one: (one.attempt, one.step)
    ):
        if record.attempt != attempt:
            attempt = record.attempt
            found = {step: kept for step, kept in found.items() if step < record.step}
        found[record.step] = record
    return [found[step] for step in sorted(found)]
