"""Merging the files of a history's successive writers. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bamboo_core.history.gaps import NOT_RECORDED, Range, holes, joined, without
from bamboo_core.history.records import EvaluationRecord, EventRecord, GapRecord, Record, StepRecord


def merged(records: Iterable[Record]) -> list[Record]:
    """Return each record once, by attempt, step and time. A new writer may have repeated a record.

    A job that went back to a checkpoint has several attempts, which may share steps. The gaps are what remains after
    all files are read: a writer's gap that no other filled, and steps that no writer mentions.
    """
    steps: dict[tuple[int, int], StepRecord] = {}
    evaluations: dict[tuple[int, int], EvaluationRecord] = {}
    events: dict[tuple[str, int], EventRecord] = {}
    reported: list[GapRecord] = []
    for record in records:
        match record:
            case StepRecord():
                steps.setdefault((record.attempt, record.step), record)
            case EvaluationRecord():
                evaluations.setdefault((record.attempt, record.step), record)
            case EventRecord():
                events.setdefault((record.source, record.number), record)
            case GapRecord():
                reported.append(record)
    gaps = _gaps([steps[key] for key in sorted(steps)], reported)
    others: list[EventRecord | GapRecord] = sorted([*events.values(), *gaps], key=lambda record: record.time)
    return _woven(sorted([*steps.values(), *evaluations.values()], key=_place), others)


def _place(record: StepRecord | EvaluationRecord) -> tuple[int, int, bool]:
    """Sort key: an evaluation follows the step whose state it evaluates."""
    return record.attempt, record.step, isinstance(record, EvaluationRecord)


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the latest version of each step and evaluation, all events, and the curve's gaps. records: of `merged`."""
    records = list(records)
    last = {record.step: id(record) for record in curve(records)}
    begun: dict[int, int] = {}  # the first step of each attempt
    evaluated: dict[int, int] = {}  # the newest attempt that evaluated the state after a step
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
                end = min([record.last, *(step - 1 for step in later)])  # later steps were repeated
                left = without((record.first, end), last) if record.first <= end else []
                seen += [msgspec.structs.replace(record, first=one, last=other) for one, other in left]
            case _:
                seen.append(record)
    return seen


def _begun_later(begun: Mapping[int, int], attempt: int) -> list[int]:
    """Return the first steps of the attempts after that one."""
    return [step for one, step in begun.items() if one > attempt]


def _gaps(steps: Sequence[StepRecord], told: Sequence[GapRecord]) -> list[GapRecord]:
    """Return each attempt's gaps: steps that are reported missing and absent, or missing between or before its own
    steps.
    """
    present: dict[int, dict[int, float]] = {}
    for record in steps:
        present.setdefault(record.attempt, {})[record.step] = record.time
    since = 1  # the first step after the previous attempt's
    gaps: list[GapRecord] = []
    for attempt in sorted({*present, *(gap.attempt for gap in told)}):
        times = present.get(attempt, {})
        mine = [gap for gap in told if gap.attempt == attempt]
        missing = [left for gap in mine for left in without((gap.first, gap.last), times)]
        begun = min([*times, *(gap.first for gap in mine)])
        missing += holes(times, min(begun, since))
        gaps += [_gap(attempt, one, times, mine) for one in joined(missing)]
        since = max([*times, *(gap.last for gap in mine)]) + 1
    return gaps


def _gap(attempt: int, missing: Range, there: Mapping[int, float], told: Sequence[GapRecord]) -> GapRecord:
    """Return the record of a gap, as reported before, or at the time of the first step after it."""
    first, last = missing
    earlier = next((gap for gap in told if gap.first <= last and gap.last >= first), None)
    if earlier is not None:
        return msgspec.structs.replace(earlier, first=first, last=last)
    return GapRecord(attempt=attempt, time=there[last + 1], first=first, last=last, message=NOT_RECORDED)


def _woven(steps: Sequence[StepRecord | EvaluationRecord], others: Sequence[EventRecord | GapRecord]) -> list[Record]:
    """Merge in time order, keeping the steps' order; every other record comes before the first later step."""
    woven: list[Record] = []
    waiting = list(reversed(others))
    for step in steps:
        while waiting and waiting[-1].time <= step.time:
            woven.append(waiting.pop())
        woven.append(step)
    return [*woven, *reversed(waiting)]


def curve(records: Iterable[Record]) -> list[StepRecord]:
    """Return each step once, from the newest attempt that reached it. A later attempt replaces everything that earlier
    ones did from its first step on.
    """
    steps: dict[int, StepRecord] = {}
    attempt = 0
    for record in sorted(
        (record for record in records if isinstance(record, StepRecord)), key=lambda one: (one.attempt, one.step)
    ):
        if record.attempt != attempt:
            attempt = record.attempt
            steps = {step: kept for step, kept in steps.items() if step < record.step}
        steps[record.step] = record
    return [steps[step] for step in sorted(steps)]
