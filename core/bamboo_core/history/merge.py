"""Merging of records from the files of a history's successive writers. Pure."""

from collections.abc import Iterable, Sequence

from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord


def merged(records: Iterable[Record]) -> list[Record]:
    """Sort the records, and drop duplicates, since a new writer may repeat a record.

    Steps and evaluations are sorted by attempt and step; events are inserted by time. A job that went back to a
    checkpoint has several attempts, and the same step may be in more than one.
    """
    steps: dict[tuple[int, int], StepRecord] = {}
    evaluations: dict[tuple[int, int], EvaluationRecord] = {}
    events: dict[tuple[str, int], EventRecord] = {}
    for record in records:
        match record:
            case StepRecord():
                steps.setdefault((record.attempt, record.step), record)
            case EvaluationRecord():
                evaluations.setdefault((record.attempt, record.step), record)
            case EventRecord():
                events.setdefault((record.source, record.number), record)
    others = sorted(events.values(), key=lambda record: record.time)
    return _woven(sorted([*steps.values(), *evaluations.values()], key=_place), others)


def _place(record: StepRecord | EvaluationRecord) -> tuple[int, int, bool]:
    """Return the sort key: an evaluation follows the step whose state it evaluates."""
    return record.attempt, record.step, isinstance(record, EvaluationRecord)


def newest(records: Iterable[Record]) -> list[Record]:
    """Drop the steps and evaluations that a later attempt replaced; keep all events. records: from `merged`."""
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
                later = [step for attempt, step in begun.items() if attempt > record.attempt]
                done_again = record.step >= min(later, default=record.step + 1)
                seen += [] if done_again or evaluated[record.step] > record.attempt else [record]
            case _:
                seen.append(record)
    return seen


def _woven(steps: Sequence[StepRecord | EvaluationRecord], others: Sequence[EventRecord]) -> list[Record]:
    """Insert events (`others`) by time, each before the first step that is not earlier; keep the order of `steps`."""
    woven: list[Record] = []
    waiting = list(reversed(others))
    for step in steps:
        while waiting and waiting[-1].time <= step.time:
            woven.append(waiting.pop())
        woven.append(step)
    return [*woven, *reversed(waiting)]


def curve(records: Iterable[Record]) -> list[StepRecord]:
    """Return the records of the training curve, one for each step. From its first step on, an attempt replaces all
    earlier attempts.
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
