"""What a finished run tells: as text for a person, as JSON for a program."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bamboo.terminal.checkpoint_line import CheckpointFacts, checkpoint_line
from bamboo_core.control.digests import add_digests
from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.coordinator.events import Finish, Outcome, Status, Takeover
from bamboo_core.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNRECOVERABLE
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import count, duration, metrics, size

EXIT_CODES = {
    Outcome.COMPLETE: EXIT_OK,
    Outcome.FAILED: EXIT_FAILED,
    Outcome.UNRECOVERABLE: EXIT_UNRECOVERABLE,
    Outcome.INTERRUPTED: EXIT_INTERRUPTED,
}

SHOWN_CRASHES = 5
SHOWN_TAKEOVERS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is left to say of a run."""

    job: str
    outcome: Outcome
    reason: str
    message: str
    steps: int | None  # as many as were wanted
    committed: int
    first_loss: float | None
    last_loss: float | None
    seconds: float
    samples_per_second: float | None
    step_seconds: float | None
    preemptions: int
    notices: int
    takeovers: tuple[Takeover, ...]
    # of the committed steps' samples, those whose loss did not go into the step's. Every commit says how many
    # microbatches it counts; the coordinator adds up what is missing from them. Gradients are summed along with the
    # losses; that they are the right ones is what --verify shows. What a run that did not complete has trained since
    # `kept_step` is in no checkpoint, and none of these
    lost_samples: int
    digests: tuple[str, ...]
    memory: tuple[tuple[WorkerId, Memory], ...] = ()
    traffic: tuple[tuple[WorkerId, Traffic], ...] = ()  # what each worker sent in a step, in the mean
    crashes: tuple[str, ...] = ()  # workers that ended by themselves, and how
    output: str | None = None
    profiled: str | None = None  # where torch.profiler's files are, or why there are none, if it was asked for
    log_tail: str | None = None  # what the workers printed, if a failure has no better explanation
    log_shown: bool = False  # all of it has been shown
    kept_step: int = 0  # of the newest checkpoint, 0 if there is none
    first_step: int = 0  # with which this run began
    # restores, repeated_steps: how often the job went back to a checkpoint, and the steps that it did again
    restores: int = 0
    repeated_steps: int = 0
    repeated_seconds: float = 0.0  # that these usually take
    kept_in: str | None = None  # where the checkpoints are, without credentials
    stopped_early: str | None = None  # why there are fewer, if evaluations have ended the job
    skipped_steps: int = 0  # those that left the model as it was, because their loss or gradient was not finite
    evaluations: tuple[tuple[int, Mapping[str, float | None]], ...] = ()  # after which step, and the metrics
    metrics: tuple[tuple[str, float | None], ...] = ()  # of the last step, by name; None: no finite number
    grid: tuple[int, int] | None = None  # stages and pipelines at the end, None if training never began
    lacks_room: bool = False  # without replicas, for which no grid had room

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def pause_in_steps(self, takeover: Takeover) -> float | None:
        """The pause in units of an undisturbed step."""
        return takeover.pause_ms / 1000 / self.step_seconds if self.step_seconds else None


def summarize(
    job: str,
    status: Status,
    finish: Finish,
    *,
    batch: int,
    seconds: float,
) -> Summary:
    """What the job itself says; crashes, output and log are added by whoever knows of them.

    seconds: of training, without the start of the workers. batch: samples of one step.
    """
    kept, first = (status.checkpoint.step or 0, status.checkpoint.first) if status.checkpoint else (0, 0)
    done = (status.step - first) * batch
    return Summary(
        job=job,
        outcome=finish.outcome,
        reason=finish.reason,
        message=finish.message,
        steps=status.steps,
        committed=status.step,
        first_loss=status.first_loss,
        last_loss=status.loss,
        seconds=seconds,
        samples_per_second=done / seconds if done > 0 and seconds > 0 else None,
        step_seconds=status.step_seconds,
        preemptions=status.preemptions,
        notices=status.notices,
        takeovers=status.takeovers,
        lost_samples=status.lost_samples,
        digests=status.digests,
        memory=status.memory,
        traffic=status.traffic,
        kept_step=kept,
        first_step=first,
        restores=status.checkpoint.restores if status.checkpoint else 0,
        repeated_steps=status.checkpoint.repeated if status.checkpoint else 0,
        repeated_seconds=status.checkpoint.repeated_seconds if status.checkpoint else 0.0,
        kept_in=status.checkpoint.place if status.checkpoint else None,
        stopped_early=status.stopped_early or None,
        skipped_steps=status.skipped_steps,
        evaluations=tuple((step, dict(found)) for step, found in status.evaluations),
        metrics=status.metrics,
        grid=(len(status.grid[0]), len(status.grid)) if status.grid else None,
        lacks_room=status.lacks_room,
    )


def to_json(summary: Summary, **extra: Any) -> str:
    """One JSON object; `extra` is added to it."""
    document = dataclasses.asdict(summary) | {"metrics": dict(summary.metrics)}
    del document["log_shown"], document["lacks_room"]
    if summary.grid is not None:
        document["grid"] = dict(zip(("stages", "pipelines"), summary.grid, strict=True))
    for shown, takeover in zip(document["takeovers"], summary.takeovers, strict=True):
        shown |= {"pause_ms": takeover.pause_ms, "pause_steps": summary.pause_in_steps(takeover)}
    document["memory"] = {worker: msgspec.structs.asdict(memory) for worker, memory in summary.memory}
    document["traffic"] = {worker: {"total": sent.total, **sent.by_kind()} for worker, sent in summary.traffic}
    for name in ("first_loss", "last_loss"):
        if document[name] is not None and not math.isfinite(document[name]):
            document[name] = None  # JSON has no NaN
    return json.dumps(document | extra, indent=2)


def to_text(summary: Summary) -> str:
    """Return the summary as a few lines of text."""
    complete = summary.outcome is Outcome.COMPLETE
    ended = summary.outcome.value + ("" if summary.reason == summary.outcome else f", {summary.reason}")
    lines = [f"{summary.job}: {ended}. {summary.message}".rstrip()]
    if summary.first_loss is not None and summary.last_loss is not None:
        lines.append(
            f"  {steps_done(summary)}{_begun(summary)} in {summary.seconds:.1f} s"
            f"{_rate(summary.samples_per_second)}, loss {summary.first_loss:.4f} -> {summary.last_loss:.4f}"
        )
    if not complete and summary.committed > summary.kept_step:
        lines.append(f"  not kept: {_not_kept(summary)}")
    lines.append(
        f"  preemptions: {summary.preemptions} ({summary.notices} with notice), "
        f"takeovers: {len(summary.takeovers)}, samples left out: {summary.lost_samples}"
    )
    if summary.metrics:
        lines.append(f"  metrics of the last step: {metrics(dict(summary.metrics))}")
    if summary.evaluations:
        step, found = summary.evaluations[-1]
        lines.append(f"  evaluation after step {step}: {metrics(found)}")
    if summary.skipped_steps:
        lines.append(f"  skipped, as their loss or gradient was not finite: {count(summary.skipped_steps, 'step')}")
    lines += _takeovers(summary)
    if summary.kept_in is not None:
        lines.append(f"  {_checkpoint(summary, summary.kept_in)}")
    if summary.memory:
        worker, memory = max(summary.memory, key=lambda one: one[1].peak)
        lines.append(f"  most memory: {worker} with {size(memory.peak)} of {size(memory.limit)} at its peak")
    if summary.traffic:
        worker, sent = max(summary.traffic, key=lambda one: one[1].total)
        lines += [f"  most sent in a step: {_by_kind(worker, sent)}"] if sent.total else []
    if summary.crashes:
        lines.append(f"  failed workers: {_crashes(summary.crashes)}")
    if summary.digests:
        lines.append(f"  final state: {add_digests(summary.digests)[:12]}")
    if summary.output:
        log = f"the workers' log: {summary.output}/workers.log"
        lines.append(f"  weights, the workers' log and page.html: {summary.output}" if complete else f"  {log}")
    elif complete:
        lines.append("  the weights were not kept; --output DIR keeps them")
    elif summary.outcome is Outcome.FAILED and not summary.log_shown:
        lines.append("  --debug shows the workers' log with the whole traceback, --output keeps it")
    if summary.profiled:
        lines.append(f"  torch.profiler: {summary.profiled}")
    if summary.log_tail:
        lines += ["  the end of the workers' log:", *_quoted(summary.log_tail)]
    return "\n".join(lines)


def _crashes(crashes: Sequence[str]) -> str:
    """The crashes in words; those that ended alike come together, in the order of their numbers: w0, w1 exited with
    code 1; w2 was killed by SIGSEGV.
    """
    alike: dict[str, list[str]] = {}
    for worker, _, how in (crash.partition(" ") for crash in crashes):
        alike.setdefault(how, []).append(worker)
    told = []
    for how, alike_ones in list(alike.items())[:SHOWN_CRASHES]:
        workers = sorted(alike_ones, key=lambda worker: (len(worker), worker))
        more = f" and {len(workers) - SHOWN_CRASHES} more" if len(workers) > SHOWN_CRASHES else ""
        told.append(f"{', '.join(workers[:SHOWN_CRASHES])}{more} {how}")
    left = sum(len(workers) for workers in list(alike.values())[SHOWN_CRASHES:])
    return "; ".join([*told, f"{left} others"] if left else told)


def _checkpoint(summary: Summary, place: str) -> str:
    """The age does not matter any more."""
    price = duration(summary.repeated_seconds) if summary.repeated_seconds else ""
    return checkpoint_line(
        CheckpointFacts(
            step=summary.kept_step or None,
            place=place,
            restores=summary.restores,
            repeated=summary.repeated_steps,
            price=price,
        )
    )


def compare(disturbed: Sequence[str], undisturbed: Sequence[str]) -> bool:
    """Whether both runs ended in the same state, bit for bit, whatever their grids; nothing is equal to nothing."""
    return bool(disturbed) and bool(undisturbed) and add_digests(disturbed) == add_digests(undisturbed)


def steps_done(summary: Summary) -> str:
    """How many, of how many that were wanted."""
    early = ", stopped early," if summary.stopped_early else ""
    return f"{summary.committed} of {summary.steps or '?'} steps{early}"


def _begun(summary: Summary) -> str:
    return f", from step {summary.first_step} on," if summary.first_step else ""


def _not_kept(summary: Summary) -> str:
    """A sentence on the steps of a run that did not complete: those that it has trained and that no checkpoint has."""
    steps = count(summary.committed - summary.kept_step, "step")
    if summary.kept_step:
        return f"{steps}, all since the checkpoint of step {summary.kept_step}"
    why = "there is no checkpoint yet" if summary.kept_in else "the job keeps no checkpoints"
    return f"{steps}, all of them: {why}"


def _rate(samples_per_second: float | None) -> str:
    return f" ({samples_per_second:.1f} samples/s)" if samples_per_second else ""


def _quoted(text: str) -> list[str]:
    """The text may hold anything, also what a terminal would take for a command."""
    return ["    | " + "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in line) for line in text.split("\n")]


def _takeovers(summary: Summary) -> list[str]:
    """The longest ones if there are many, in their order; then the pauses of all."""
    shown = sorted(summary.takeovers, key=lambda taken: -taken.pause_ms)[:SHOWN_TAKEOVERS]
    lines = [f"    {_takeover(summary, taken)}" for taken in summary.takeovers if any(taken is one for one in shown)]
    if left := len(summary.takeovers) - len(lines):
        lines.append(f"    and {left} with shorter pauses (--json has all)")
    return lines + _pauses(summary)


def _takeover(summary: Summary, takeover: Takeover) -> str:
    where = f"stage {takeover.stage} of pipeline {takeover.pipeline} at step {takeover.step}"
    who = f"{takeover.victim} -> {takeover.worker}"
    steps = summary.pause_in_steps(takeover)
    pause = f"pause {takeover.pause_ms:.0f} ms" + (f" ({steps:.2f} steps)" if steps is not None else "")
    phases = (
        f"decide {takeover.decide_ms:.0f}, reform {takeover.reform_ms:.0f}, recompute {takeover.recompute_ms:.0f}"
        f" ({takeover.forwards} forward, {takeover.backwards} backward)"
    )
    return f"{where}: {who}, {pause}: {phases}{', with notice' if takeover.notice else ''}"


def _by_kind(worker: WorkerId, sent: Traffic) -> str:
    kinds = sorted(sent.by_kind().items(), key=lambda item: -item[1])
    said = ", ".join(f"{kind} {size(count)}" for kind, count in kinds if count)
    return f"{worker} with {size(sent.total)} ({said})"


def _pauses(summary: Summary) -> list[str]:
    pauses = [takeover.pause_ms for takeover in summary.takeovers]
    if len(pauses) < 2:
        return []
    return [f"    median pause {statistics.median(pauses):.0f} ms, longest {max(pauses):.0f} ms"]
