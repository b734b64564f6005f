"""One line about a job's checkpoints, wherever the job runs. Pure."""

from dataclasses import dataclass

from bamboo_core.coordinator.events import CheckpointSummary
from bamboo_core.text import count, duration


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What the line on checkpoints says."""

    # step, age: of the newest one, None if there is none or it is not known
    step: int | None
    age: float | None = None
    place: str = ""  # without credentials
    writing: str = ""  # in words
    restores: int = 0
    repeated: int = 0  # steps, after so many times (restores) that the job went back
    price: str = ""  # the time that these took, in words


def checkpoint_line(facts: CheckpointFacts) -> str:
    """Such as `checkpoint: step 200, 3:05 old, in s3://bucket/llama; 12 steps repeated (0:40)`."""
    newest = "none yet" if facts.step is None else f"step {facts.step}"
    if facts.step is not None and facts.age is not None:
        newest += f", {duration(max(0.0, facts.age))} old"
    parts = [f"checkpoint: {newest}" + (f", in {facts.place}" if facts.place else "")]
    if facts.writing:
        parts.append(facts.writing)
    if facts.restores:
        parts.append(f"went back {count(facts.restores, 'time')}")
    if facts.repeated:
        parts.append(f"{count(facts.repeated, 'step')} repeated" + (f" ({facts.price})" if facts.price else ""))
    return "; ".join(parts)


def of_run(summary: CheckpointSummary) -> str:
    """The line on the checkpoints of a job whose coordinator is at hand."""
    writing = summary.writing
    told = f"writing step {writing.step}, {writing.written} of {count(writing.layers, 'layer')}" if writing else ""
    price = duration(summary.repeated_seconds) if summary.repeated_seconds else ""
    return checkpoint_line(
        CheckpointFacts(
            step=summary.step,
            age=summary.age,
            place=summary.place,
            writing=told,
            restores=summary.restores,
            repeated=summary.repeated,
            price=price,
        )
    )
