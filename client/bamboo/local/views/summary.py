"""The summary of a finished run: as text for a person, as JSON for a program."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from bamboo.terminal.phrases import checkpoint_of_run
from bamboo.terminal.tables import indented_json
from bamboo_core.control.digests import add_digests
from bamboo_core.control.memory import Traffic
from bamboo_core.coordinator.events import Outcome, Status, Takeover
from bamboo_core.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNRECOVERABLE
from bamboo_core.planning.plan import WorkerId
from bamboo_core.text import count, metrics, size

EXIT_CODES = {
    Outcome.COMPLETE: EXIT_OK,
    Outcome.FAILED: EXIT_FAILED,
    Outcome.UNRECOVERABLE: EXIT_UNRECOVERABLE,
    Outcome.INTERRUPTED: EXIT_INTERRUPTED,
}

OF_STATUS: Final = (  # fields that the JSON copies from the status
    "steps",
    "first_loss",
    "step_seconds",
    "preemptions",
    "notices",
    "lost_samples",
    "digests",
    "skipped_steps",
    "evaluations",
)
SHOWN_CRASHES = 5
SHOWN_TAKEOVERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of a run. status: the coordinator's last status. batch: samples per step.

    seconds: the time of training, without the start of the workers. `status.lost_samples` counts the samples that are
    missing from committed steps. Steps that an incomplete run has trained since `kept_step` are in no checkpoint.
    """

    job: str
    outcome: Outcome
    reason: str
    message: str
    status: Status
    seconds: float
    batch: int
    crashes: tuple[str, ...] = ()  # workers that ended by themselves, and how
    output: str | None = None
    log_tail: str | None = None  # what the workers printed, if a failure has no better explanation
    log_shown: bool = False  # --debug has shown the whole log

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def kept_step(self) -> int:
        """The step of the newest checkpoint; 0 without a checkpoint."""
        return (self.status.checkpoint.step or 0) if self.status.checkpoint else 0

    @property
    def first_step(self) -> int:
        """The step from which this run started; 0 without a checkpoint."""
        return self.status.checkpoint.first if self.status.checkpoint else 0

    @property
    def samples_per_second(self) -> float | None:
        """The mean rate of training over the whole run; None if no step was done."""
        done = (self.status.step - self.first_step) * self.batch
        return done / self.seconds if done > 0 and self.seconds > 0 else None

    @property
    def grid(self) -> tuple[int, int] | None:
        """Stages and pipelines at the end; None if training never began."""
        return (len(self.status.grid[0]), len(self.status.grid)) if self.status.grid else None

    def pause_in_steps(self, takeover: Takeover) -> float | None:
        """Return a takeover's pause divided by the median duration of recent steps; None if that is unknown."""
        step = self.status.step_seconds
        return takeover.pause_ms / 1000 / step if step else None


def to_json(summary: Summary, **extra: Any) -> str:
    """Return the summary as a JSON object with the fields of `extra`. Numbers that are not finite are null."""
    status, kept = summary.status, summary.status.checkpoint
    document = {
        **{name: getattr(summary, name) for name in ("job", "outcome", "reason", "message", "seconds")},
        **{name: getattr(status, name) for name in OF_STATUS},
        "committed": status.step,
        "last_loss": status.loss,
        "samples_per_second": summary.samples_per_second,
        "takeovers": [
            asdict(one) | {"pause_ms": one.pause_ms, "pause_steps": summary.pause_in_steps(one)}
            for one in status.takeovers
        ],
        "memory": dict(status.memory),
        "traffic": {worker: {"total": sent.total, **sent.by_kind()} for worker, sent in status.traffic},
        **{name: getattr(summary, name) for name in ("crashes", "output", "log_tail")},
        "kept_step": summary.kept_step,
        "first_step": summary.first_step,
        "restores": kept.counts.restored if kept else 0,
        "repeated_steps": kept.counts.repeated if kept else 0,
        "repeated_seconds": kept.counts.repeated_seconds if kept else 0.0,
        "kept_in": kept.place if kept else None,
        "stopped_early": status.stopped_early or None,
        "metrics": dict(status.metrics),
        "grid": dict(zip(("stages", "pipelines"), summary.grid, strict=True)) if summary.grid else None,
    }
    return indented_json(document | extra)


def to_text(summary: Summary) -> str:
    """Return the summary as a few lines of text."""
    complete, status = summary.outcome is Outcome.COMPLETE, summary.status
    ended = summary.outcome.value + ("" if summary.reason == summary.outcome else f", {summary.reason}")
    lines = [f"{summary.job}: {ended}. {summary.message}".rstrip()]
    if status.first_loss is not None and status.loss is not None:
        begun = f", from step {summary.first_step} on," if summary.first_step else ""
        rate = f" ({summary.samples_per_second:.1f} samples/s)" if summary.samples_per_second else ""
        lines.append(
            f"  {steps_done(summary)}{begun} in {summary.seconds:.1f} s{rate},"
            f" loss {status.first_loss:.4f} -> {status.loss:.4f}"
        )
    if not complete and status.step > summary.kept_step:
        lines.append(f"  not kept: {_not_kept(summary)}")
    lines.append(
        f"  preemptions: {status.preemptions} ({status.notices} with notice), "
        f"takeovers: {len(status.takeovers)}, samples left out: {status.lost_samples}"
    )
    if status.metrics:
        lines.append(f"  metrics of the last step: {metrics(dict(status.metrics))}")
    if status.evaluations:
        step, found = status.evaluations[-1]
        lines.append(f"  evaluation after step {step}: {metrics(found)}")
    if status.skipped_steps:
        lines.append(f"  skipped, as their loss or gradient was not finite: {count(status.skipped_steps, 'step')}")
    lines += _takeovers(summary)
    if status.checkpoint is not None:
        kept = replace(status.checkpoint, age=None, writing=None)  # both are out of date
        lines.append(f"  {checkpoint_of_run(kept)}")
    if status.memory:
        worker, memory = max(status.memory, key=lambda one: one[1].peak)
        lines.append(f"  most memory: {worker} with {size(memory.peak)} of {size(memory.limit)} at its peak")
    if status.traffic:
        worker, sent = max(status.traffic, key=lambda one: one[1].total)
        lines += [f"  most sent in a step: {_by_kind(worker, sent)}"] if sent.total else []
    if summary.crashes:
        lines.append(f"  failed workers: {_crashes(summary.crashes)}")
    if status.digests:
        lines.append(f"  final state: {add_digests(status.digests)[:12]}")
    if summary.output:
        log = f"the workers' log: {summary.output}/workers.log"
        lines.append(f"  weights, the workers' log and page.html: {summary.output}" if complete else f"  {log}")
    elif complete:
        lines.append("  the weights were not kept; --output DIR keeps them")
    elif summary.outcome is Outcome.FAILED and not summary.log_shown:
        lines.append("  --debug shows the workers' log with the whole traceback, --output keeps it")
    if summary.log_tail:
        lines += ["  the end of the workers' log:", *_quoted(summary.log_tail)]
    return "\n".join(lines)


def _crashes(crashes: Sequence[str]) -> str:
    """Return the crashes in words, grouped by kind: "w0, w1 exited with code 1; w2 was killed by SIGSEGV"."""
    alike: dict[str, list[str]] = {}
    for worker, _, how in (crash.partition(" ") for crash in crashes):
        alike.setdefault(how, []).append(worker)
    groups = []
    for how, alike_ones in list(alike.items())[:SHOWN_CRASHES]:
        workers = sorted(alike_ones, key=lambda worker: (len(worker), worker))
        more = f" and {len(workers) - SHOWN_CRASHES} more" if len(workers) > SHOWN_CRASHES else ""
        groups.append(f"{', '.join(workers[:SHOWN_CRASHES])}{more} {how}")
    left = sum(len(workers) for workers in list(alike.values())[SHOWN_CRASHES:])
    return "; ".join([*groups, f"{left} others"] if left else groups)


def compare(disturbed: Sequence[str], undisturbed: Sequence[str]) -> bool:
    """Return whether both runs ended in the same state, bit for bit, on any grids; False if either has no digests."""
    return bool(disturbed) and bool(undisturbed) and add_digests(disturbed) == add_digests(undisturbed)


def steps_done(summary: Summary) -> str:
    """Return the numbers of steps done and planned in words: "40 of 100 steps"."""
    early = ", stopped early," if summary.status.stopped_early else ""
    return f"{summary.status.step} of {summary.status.steps or '?'} steps{early}"


def _not_kept(summary: Summary) -> str:
    """Return a phrase: how many steps of an incomplete run are in no checkpoint, and why."""
    steps = count(summary.status.step - summary.kept_step, "step")
    if summary.kept_step:
        return f"{steps}, all since the checkpoint of step {summary.kept_step}"
    why = "there is no checkpoint yet" if summary.status.checkpoint else "the job keeps no checkpoints"
    return f"{steps}, all of them: {why}"


def _quoted(text: str) -> list[str]:
    """Return the text as quoted lines without control characters, which a terminal would execute."""
    return ["    | " + "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in line) for line in text.split("\n")]


def _takeovers(summary: Summary) -> list[str]:
    """Return lines on the longest takeovers in order of time, the number of others, median pause and longest pause."""
    shown = sorted(summary.status.takeovers, key=lambda taken: -taken.pause_ms)[:SHOWN_TAKEOVERS]
    lines = [
        f"    {_takeover(summary, taken)}" for taken in summary.status.takeovers if any(taken is one for one in shown)
    ]
    if left := len(summary.status.takeovers) - len(lines):
        lines.append(f"    and {left} with shorter pauses (--json has all)")
    pauses = [taken.pause_ms for taken in summary.status.takeovers]
    if len(pauses) > 1:
        lines.append(f"    median pause {statistics.median(pauses):.0f} ms, longest {max(pauses):.0f} ms")
    return lines


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
    sizes = ", ".join(f"{kind} {size(count)}" for kind, count in kinds if count)
    return f"{worker} with {size(sent.total)} ({sizes})"
