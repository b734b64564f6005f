"""What a logger is: something that takes the records of a job's history."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bamboo_core.history.records import EvaluationRecord, Record, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerFacts:
    """What a logger may know of the job."""

    job: str  # its name
    run: str  # the same for all who write for that job, one after the other
    folder: str = ""  # of the job's history on this machine; "" if it is in an object store


class Logger(Protocol):
    """Called by a thread of its own. What it raises is told once, and it is made anew and asked once more."""

    def write(self, records: Sequence[Record]) -> None:
        """Records that are in the history, in order; the last ones may have been given to a logger before, if that one
        was lost with its worker.
        """

    def close(self) -> None:
        """Closes the logger: no more will come from this worker."""


MakeLogger = Callable[[LoggerFacts], Logger]


def scalars(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """The numbers of a step, or of an evaluation of the state after it, by name; those that are known."""
    if isinstance(record, EvaluationRecord):
        return _known({f"evaluation/{name}": value for name, value in record.metrics.items()})
    found = {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "learning_rate": record.learning_rate,
        "seconds": record.seconds,
        "samples": record.samples,
        "samples_per_second": record.samples_per_second,
        "tokens": record.tokens,
        "tokens_per_second": record.tokens_per_second,
    }
    return _known(found | record.metrics)


def _known(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value is not None}
