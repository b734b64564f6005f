"""From the files of those who have written a history, one after the other, to the history. Pure."""

import csv
import io
from collections.abc import Iterable, Sequence

from bamboo.history.records import EventRecord, GapRecord, Record, StepRecord

COLUMNS = (
    "attempt", "step", "time", "loss", "gradient_norm", "learning_rate", "seconds", "samples", "samples_per_second",
    "tokens", "tokens_per_second", "skipped",
)  # fmt: skip


def merged(records: Iterable[Record]) -> list[Record]:
    """Each record once, in the order of attempts, steps and time. Who takes over may have written one a second time.

    A job that has gone back to a checkpoint has several attempts, and steps that are in more than one of them.
    """
    steps: dict[tuple[int, int], StepRecord] = {}
    events: dict[tuple[str, int], EventRecord] = {}
    gaps: dict[tuple[int, int, int], GapRecord] = {}
    for record in records:
        match record:
            case StepRecord():
                steps.setdefault((record.attempt, record.step), record)
            case EventRecord():
                events.setdefault((record.source, record.number), record)
            case GapRecord():
                gaps.setdefault((record.attempt, record.first, record.last), record)
    in_order = sorted(steps.values(), key=lambda record: (record.attempt, record.step))
    others: list[EventRecord | GapRecord] = sorted([*events.values(), *gaps.values()], key=lambda record: record.time)
    return _woven(in_order, others)


def _woven(steps: Sequence[StepRecord], others: Sequence[EventRecord | GapRecord]) -> list[Record]:
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
    all that the attempts before it had done from its first step on. An evaluation of the last state comes behind them.
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


def to_csv(records: Iterable[Record]) -> str:
    """The steps as a table; a column for each metric, and for each of an evaluation."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    metrics = sorted({name for record in steps for name in record.metrics})
    evaluated = sorted({name for record in steps for name in record.evaluation})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, *metrics, *(f"evaluation {name}" for name in evaluated)])
    for record in steps:
        values = [getattr(record, name) for name in COLUMNS]
        values += [record.metrics.get(name) for name in metrics] + [record.evaluation.get(name) for name in evaluated]
        writer.writerow(["" if value is None else value for value in values])
    return out.getvalue()
