"""The interface of a logger, which takes the records of a job's history."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bamboo_core.history.records import EvaluationRecord, Record, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerFacts:
    """The facts about the job that a logger gets."""

    job: str  # its name
    run: str  # the same for all that write for that job, one after the other
    folder: str = ""  # of the job's history on this machine; "" if it is in an object store


class Logger(Protocol):
    """A writer of the history to another system, called by a separate thread.

    An error is reported once; then the logger is created again and called again.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Take records of the history, in order; a logger lost with its worker may have been given the last ones
        before.
        """

    def close(self) -> None:
        """Close the logger: no more records come from this worker."""


MakeLogger = Callable[[LoggerFacts], Logger]


def scalars(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return the known numbers of a step, or of an evaluation of the state after it, by name."""
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
