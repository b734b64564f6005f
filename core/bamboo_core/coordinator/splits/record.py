"""What a coordinator knows of the split of the layers: one that it is changing, and which ones are faster."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.plan import Cell, CheckpointId, WorkerId
from bamboo_core.planning.splits.backoff import Backoff
from bamboo_core.planning.splits.resplit import Grid
from bamboo_core.planning.splits.tried_splits import Trial, TriedSplit, remembering
from bamboo_core.planning.splits.uneven_split import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Resplit:
    """Layers that are to be split anew (`resplit`).

    number: of the wish for a cut, at that step or a later one. asked, asked_at: the root that was told last. cut: once
    a commit has carried the wish. since: when the wish, then the cut, came. held: by worker, the layers of the cut's
    state that it says it has copies of. stages: for the sake of speed; the grid stays, and everybody its place.
    """

    number: int
    at: int
    since: float
    asked: WorkerId | None = None
    asked_at: float = 0.0
    cut: CheckpointId | None = None
    held: Mapping[WorkerId, frozenset[int]] = field(default_factory=dict)
    stages: Ranges | None = None

    def asked_of(self, root: WorkerId, now: float) -> "Resplit":
        return replace(self, asked=root, asked_at=now)

    def carried(self, cut: CheckpointId, now: float) -> "Resplit":
        """A commit has carried the wish."""
        return replace(self, cut=cut, since=now)

    def held_by(self, worker: WorkerId, layers: Iterable[int], cut: CheckpointId) -> "Resplit":
        held = {**self.held, worker: self.held.get(worker, frozenset()) | frozenset(layers)}
        return replace(self, cut=cut, held=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Who is filled before the layers are split anew (`filling`): of each cell, the workers that become replicas.

    origin: of the plan in force; grid: that is to be; staying: the workers that count on that. It holds for these.
    """

    origin: int
    grid: Grid
    staying: frozenset[WorkerId]
    replicas: Mapping[Cell, tuple[WorkerId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """resplit: layers that are to be split anew, if they are. filling: who is filled before that. Only the methods here
    make a new value.
    """

    resplit: Resplit | None = None
    filling: Filling | None = None

    def wished(self, number: int, at: int, stages: Ranges | None, now: float) -> "Splits":
        """A cut at that step is wished for. stages: of the split that is taken for the sake of speed."""
        return replace(self, resplit=Resplit(number=number, at=at, since=now, stages=stages))

    def asked_of(self, root: WorkerId, now: float) -> "Splits":
        assert self.resplit is not None
        return replace(self, resplit=self.resplit.asked_of(root, now))

    def carried(self, cut: CheckpointId, now: float) -> "Splits":
        """A commit has carried the wish."""
        assert self.resplit is not None
        return replace(self, resplit=self.resplit.carried(cut, now))

    def held_by(self, worker: WorkerId, layers: Iterable[int], cut: CheckpointId, now: float) -> "Splits":
        """A worker has copies of these layers of the cut's state; it may be heard of before the commit is."""
        known = self.resplit
        if known is None or (known.cut is not None and known.cut != cut):
            known = Resplit(number=0, at=cut.step, since=now)
        elif known.cut is None:
            known = known.carried(cut, now)
        return replace(self, resplit=known.held_by(worker, layers, cut))

    def not_resplit(self) -> "Splits":
        """The layers are split as they are to be, or the wish is withdrawn."""
        return self if self.resplit is None else replace(self, resplit=None)

    def filled(self, filling: Filling | None) -> "Splits":
        return self if filling is self.filling else replace(self, filling=filling)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPace:
    """What a worker has taken for its layers so far, so that it can be compared with itself.

    newest: seconds of a microbatch at the last looks, oldest first. usual: the least median of as many as are kept;
    None until there are as many.
    """

    newest: tuple[float, ...] = ()
    usual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceState:
    """Splits for the sake of speed, and whether they pay (`rebalancing`). Only the methods here make a new value.

    uneven: since when, and since which step, another split of the layers is expected to be faster; better: that split,
    once it is for long enough. trial: the newest split for the sake of speed, until it is known whether it pays;
    unpaid: it did not, and the one before it is to be taken again. tried: what steps took with the splits that were
    measured. schedule: by which steps ran that these and the trial were measured with.
    backoff, acted_step: of splits for the sake of speed, and of replacements of slow workers. pause: of the last split,
    in seconds.
    """

    uneven: tuple[float, int] | None = None
    better: Trial | None = None
    trial: Trial | None = None
    unpaid: bool = False
    tried: tuple[TriedSplit, ...] = ()
    schedule: PipelineSchedule | None = None
    backoff: Backoff = field(default_factory=Backoff)
    acted_step: int = 0
    pause: float | None = None

    def wanted(self, now: float) -> "BalanceState":
        """Something is to be done about speeds."""
        return replace(self, backoff=self.backoff.wanted(now))

    def acted(self, shortest: float, step: int, now: float) -> "BalanceState":
        """Something is done about speeds: a replacement or a split. shortest: seconds from one measure to the next, at
        least. step: how many are committed.
        """
        backoff = self.backoff.after(shortest, now)
        return replace(self, backoff=backoff, acted_step=step, uneven=None, better=None, trial=None, unpaid=False)

    def on_trial(self, split: Trial, before: TriedSplit) -> "BalanceState":
        """That split is made. before: what a step took until now."""
        return replace(self, trial=split, tried=remembering(self.tried, before))

    def expecting(self, since: tuple[float, int], better: Trial | None) -> "BalanceState":
        """Another split has been expected to be faster since then; better: that is to be made."""
        return replace(self, uneven=since, better=better)

    def expecting_nothing(self) -> "BalanceState":
        """No split is better."""
        if not (self.uneven or self.better or self.unpaid):
            return self
        return replace(self, uneven=None, better=None, unpaid=False)

    def asked_for(self) -> "BalanceState":
        """Layers are about to be split anew, be it for another reason."""
        return replace(self, better=None, uneven=None)

    def under(self, schedule: PipelineSchedule) -> "BalanceState":
        """By another schedule steps take other times with the same split, so nothing that was measured can be
        compared.
        """
        if self.schedule is schedule:
            return self
        known = self
        if self.schedule is not None:
            known = replace(self, trial=None, tried=(), unpaid=False, uneven=None, better=None)
        return replace(known, schedule=schedule)

    def without_trial(self) -> "BalanceState":
        """Nothing can be said of the split that was on trial."""
        return replace(self, trial=None)

    def judged(self, measured: TriedSplit, *, unpaid: bool) -> "BalanceState":
        """It is known what a step takes with the split that was on trial, unless speeds are others by now. unpaid: the
        one before it is to be taken again.
        """
        return replace(self, trial=None, tried=remembering(self.tried, measured), unpaid=unpaid)

    def paused(self, seconds: float | None) -> "BalanceState":
        """A split has stopped the job for so long; None: nobody knows for how long."""
        return replace(self, pause=seconds)
