"""The lines of a history: steps, events, and what is missing. Anything may be added to them later."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

MOST_METRICS = 200
Metrics = Annotated[dict[str, float | None], msgspec.Meta(max_length=MOST_METRICS)]


class HistoryError(ValueError):
    """A history cannot be read; the text is a sentence."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """A committed step. attempt: 1 for the job's first beginning, more each time it has begun anew from a checkpoint.

    time: when it was committed, seconds since 1970. seconds: since the step before; None if that is not known. samples,
    tokens: of all steps up to this one; tokens: None if the data set does not say how many a sample has. loss,
    gradient_norm: None if they are not finite. gradient_norm: before clipping. skipped: the model was left as it was.
    metrics: further numbers, by name; None if not finite. evaluation: the same of the state before this step, if it was
    evaluated. trained: False of the state after the last step, of which there is an evaluation and nothing else.
    """

    attempt: int
    step: int
    time: float
    loss: float | None
    gradient_norm: float | None
    learning_rate: float | None = None
    seconds: float | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    skipped: bool = False
    metrics: Metrics = msgspec.field(default_factory=dict)
    evaluation: Metrics = msgspec.field(default_factory=dict)
    trained: bool = True


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag="event", tag_field="kind"):
    """Something that happened to the job. source, number: name it; whoever tells of events counts its own."""

    attempt: int
    time: float
    reason: str
    message: str
    warning: bool = False
    source: str = ""
    number: int = 0


class GapRecord(msgspec.Struct, frozen=True, kw_only=True, tag="gap", tag_field="kind"):
    """Steps `first` to `last` are not recorded, for that reason."""

    attempt: int
    time: float
    first: int
    last: int
    message: str


Record = StepRecord | EventRecord | GapRecord
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


def to_lines(records: Iterable[Record]) -> bytes:
    """JSON, one record a line."""
    return b"".join(_encoder.encode(record) + b"\n" for record in records)


def from_lines(data: bytes, name: str) -> list[Record]:
    """Raises HistoryError naming the line. name: of the file."""
    records: list[Record] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            records.append(_decoder.decode(line))
        except (msgspec.DecodeError, RecursionError) as error:
            raise HistoryError(f"{name} line {number} is no record of a history: {error}") from None
    return records
