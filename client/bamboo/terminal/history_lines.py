"""A job's training history as text, one line for each record of a step, an evaluation or an event."""

import json
from datetime import datetime

from bamboo_core.history.records import EvaluationRecord, Record, StepRecord
from bamboo_core.text import printable


def line(record: Record) -> str:
    match record:
        case StepRecord():
            return _step(record)
        case EvaluationRecord():
            return printable(f"{_clock(record.time)}  after step {record.step}, {_evaluated(record)}")
    return printable(f"{_clock(record.time)}  {record.reason}: {record.message}")


def _step(record: StepRecord) -> str:
    parts = [f"step {record.step}", f"loss {_number(record.loss)}", f"gradient norm {_number(record.gradient_norm)}"]
    if record.learning_rate is not None:
        parts.append(f"rate {record.learning_rate:.3g}")
    if record.seconds is not None:
        parts.append(f"{record.seconds:.3f} s")
    if record.tokens_per_second is not None:
        parts.append(f"{record.tokens_per_second:.0f} tokens/s")
    elif record.samples_per_second is not None:
        parts.append(f"{record.samples_per_second:.1f} samples/s")
    parts += [f"{name} {_number(value)}" for name, value in sorted(record.metrics.items())]
    parts += ["skipped"] if record.skipped else []
    parts += [f"attempt {record.attempt}"] if record.attempt > 1 else []
    return printable(f"{_clock(record.time)}  {', '.join(parts)}")


def _evaluated(record: EvaluationRecord) -> str:
    text = ", ".join(f"evaluation {name} {_number(value)}" for name, value in sorted(record.metrics.items()))
    return f"{text}, attempt {record.attempt}" if record.attempt > 1 else text


def _number(value: float | None) -> str:
    return "not finite" if value is None else json.dumps(float(f"{value:.6g}"))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
