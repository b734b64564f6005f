"""The records of a history file, one JSON line each: steps, evaluations and events. Fields may be added later.
The first line of a file names the format's version.
"""

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

VERSION: Final = 2
MOST_METRICS = 200
Metrics = Annotated[dict[str, float | None], msgspec.Meta(max_length=MOST_METRICS)]


class HistoryError(ValueError):
    """Error because a history is missing or cannot be read; its text is a sentence for the user."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """A committed step."""

    attempt: int  # 1 for the job's first start; one more for each restart from a checkpoint
    # counts from 1; the checkpoint of a step holds the state after it
    step: int
    time: float  # of the commit, seconds since 1970
    # None if not finite
    loss: float | None
    gradient_norm: float | None  # before clipping
    learning_rate: float | None = None
    seconds: float | None = None  # since the step before; None if unknown
    # samples, tokens: of all steps up to this one
    samples: int | None = None
    samples_per_second: float | None = None
    tokens: int | None = None  # None if neither task nor dataset gives a sample's tokens
    tokens_per_second: float | None = None
    skipped: bool = False  # the model was left unchanged
    checkpoint: bool = False  # a checkpoint of the state after the step was begun
    metrics: Metrics = msgspec.field(default_factory=dict)  # further metrics, by name; None: not finite


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """The result of an evaluation of the state after a step; step 0: of the initial state."""

    attempt: int
    step: int
    time: float
    metrics: Metrics


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag="event", tag_field="kind"):
    """An event of the job, such as a takeover, for users: a CamelCase reason and a sentence."""

    attempt: int
    time: float
    reason: str
    message: str
    warning: bool = False
    # source, number: identify the event; each source counts its own
    source: str = ""
    number: int = 0


class _Beginning(msgspec.Struct, frozen=True, tag="history", tag_field="kind"):
    """The first line of a history file."""

    version: int


Record = StepRecord | EvaluationRecord | EventRecord
_decoder: msgspec.json.Decoder[Record | _Beginning] = msgspec.json.Decoder(Record | _Beginning)
_encoder = msgspec.json.Encoder()
BEGINNING: Final = _encoder.encode(_Beginning(VERSION)) + b"\n"


def to_lines(records: Iterable[Record]) -> bytes:
    """Encode a whole file: the line with the version, then one line of JSON per record."""
    return BEGINNING + b"".join(to_line(record) for record in records)


def to_line(record: Record) -> bytes:
    return _encoder.encode(record) + b"\n"


def from_lines(data: bytes, name: str) -> list[Record]:
    """Parse the records of a file, or of several concatenated files. name: shown in errors. Raises HistoryError for a
    malformed line, and for a missing or unknown version.
    """
    records: list[Record] = []
    version = None
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = _decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HistoryError(f"{name} line {number} is no record of a history: {error}") from None
        if isinstance(record, _Beginning):
            version = record.version
        else:
            records.append(record)
        if version != VERSION:
            problem = "does not begin with its version" if version is None else f"is of version {version}"
            raise HistoryError(f"{name} {problem}; this version of Bamboo reads {VERSION}")
    return records
