"""The lines of a history: steps, evaluations, events, and what is missing. Anything may be added to them later.

The first line of a file names the version of the others.
"""

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

VERSION: Final = 2
MOST_METRICS = 200
Metrics = Annotated[dict[str, float | None], msgspec.Meta(max_length=MOST_METRICS)]


class HistoryError(ValueError):
    """A history cannot be read; the text is a sentence."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """A committed step."""

    attempt: int  # 1 for the job's first beginning, more each time it has begun anew from a checkpoint
    # so many are committed with this one, so the first one is step 1, and what a checkpoint of that step has is the
    # state after it
    step: int
    time: float  # when it was committed, seconds since 1970
    # loss, gradient_norm: None if they are not finite
    loss: float | None
    gradient_norm: float | None  # before clipping
    learning_rate: float | None = None
    seconds: float | None = None  # since the step before; None if that is not known
    # samples, tokens: of all steps up to this one
    samples: int | None = None
    samples_per_second: float | None = None
    tokens: int | None = None  # None if the data set does not say how many a sample has
    tokens_per_second: float | None = None
    skipped: bool = False  # the model was left as it was
    checkpoint: bool = False  # a checkpoint was begun of the state after it
    metrics: Metrics = msgspec.field(default_factory=dict)  # further numbers, by name; None if not finite


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """What an evaluation of the state after that step came to; 0: of the state that the job began with."""

    attempt: int
    step: int
    time: float
    metrics: Metrics


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag="event", tag_field="kind"):
    """Something that happened to the job."""

    attempt: int
    time: float
    reason: str
    message: str
    warning: bool = False
    # source, number: name it; whoever tells of events counts its own
    source: str = ""
    number: int = 0


class GapRecord(msgspec.Struct, frozen=True, kw_only=True, tag="gap", tag_field="kind"):
    """Steps `first` to `last` are not recorded, for that reason."""

    attempt: int
    time: float
    first: int
    last: int
    message: str


class _Beginning(msgspec.Struct, frozen=True, tag="history", tag_field="kind"):
    """The first line of a file."""

    version: int


Record = StepRecord | EvaluationRecord | EventRecord | GapRecord
_decoder: msgspec.json.Decoder[Record | _Beginning] = msgspec.json.Decoder(Record | _Beginning)
_encoder = msgspec.json.Encoder()
BEGINNING: Final = _encoder.encode(_Beginning(VERSION)) + b"\n"


def to_lines(records: Iterable[Record]) -> bytes:
    """A whole file: JSON, one record a line."""
    return BEGINNING + b"".join(to_line(record) for record in records)


def to_line(record: Record) -> bytes:
    return _encoder.encode(record) + b"\n"


def from_lines(data: bytes, name: str) -> list[Record]:
    """Return the records of a file, or of several that were joined. Raises HistoryError naming the line. name: of the
    file.
    """
    records: list[Record] = []
    version = None
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found = _decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HistoryError(f"{name} line {number} is no record of a history: {error}") from None
        if isinstance(found, _Beginning):
            version = found.version
        else:
            records.append(found)
        if version != VERSION:
            told = "does not begin with its version" if version is None else f"is of version {version}"
            raise HistoryError(f"{name} {told}; this version of Bamboo reads {VERSION}")
    return records
