"""How a step is committed: the root decides, a new root first hears what the one before it has said.

See docs/design.md, "How a step commits".
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bamboo.plan import ROOT, Plan, WorkerId
from bamboo.protocol import StepCommitted
from bamboo_trainer.commit import replicator
from bamboo_trainer.commit.commit_log import Commit
from bamboo_trainer.transport.frames import Address, Frame, Kind

if TYPE_CHECKING:
    from bamboo_trainer.engine.engine import Engine

logger = logging.getLogger(__name__)


def decide(engine: "Engine") -> bool:
    """If this worker owns the root cell: commit the step once every cell has finished it."""
    assert engine.plan is not None
    if ROOT not in engine.runs or not engine.runs[ROOT].program:
        return False
    root, target = engine.runs[ROOT], engine.pending or engine.plan
    if engine.unheard or root.step in engine.ledger.commits or root.layout is None:
        return False
    commit = engine.ledger.decide(
        root.step, len(engine.plan.stages), root.layout, target.target.generation, target.epoch
    )
    if commit is None:
        return False
    committed(engine, root.step, commit)
    return True


def tell_coordinator(engine: "Engine", step: int, commit: Commit, seconds: float = 0.0) -> None:
    root = engine.holdings[ROOT.stage].stage if ROOT.stage in engine.holdings else None
    rate = root.learning_rate(step) if root else math.nan  # NB: a new root's state may be on its way
    engine.tell(
        StepCommitted(
            step=step,
            generation=engine.generation(step),
            loss=commit.loss if math.isfinite(commit.loss) else None,
            gradient_norm=commit.norm if math.isfinite(commit.norm) else None,
            microbatches=commit.microbatches,
            seconds=seconds,
            learning_rate=rate if math.isfinite(rate) else None,
        )
    )


def tell_commit(engine: "Engine", step: int, commit: Commit, workers: Sequence[WorkerId]) -> None:
    frame = engine.frame(Address(Kind.COMMIT, *ROOT, step), meta=commit)
    for worker in workers:
        engine.send(worker, frame)


def committed(engine: "Engine", step: int, commit: Commit) -> None:
    """A step is committed: by this root, or by another one that told us."""
    known = engine.ledger.commits.get(step)
    if known is not None:
        if (known.generation, known.epoch) != (commit.generation, commit.epoch):
            logger.error("two different commits of step %d: %s and %s: a bug in Bamboo", step, known, commit)
        return
    engine.ledger.record(step, commit)
    engine.ledger.forget(min((h.version for h in engine.holdings.values()), default=step))
    engine.echoes = {a: frame for a, frame in engine.echoes.items() if a.step > step}
    engine.ceded = {cell: frame for cell, frame in engine.ceded.items() if frame.address.step >= step}
    if ROOT in engine.runs:  # NB: a commit of the old root may have reached only some; the new one tells everybody
        assert engine.plan is not None
        now, before = engine.clock(), engine.committed_at
        engine.committed_at = now
        if before is not None:
            engine.step_seconds.observe(now - before)
        workers = engine.plan.worker_ids() | (engine.pending or engine.plan).worker_ids()
        tell_commit(engine, step, commit, sorted(workers - {engine.worker}))
        tell_coordinator(engine, step, commit, now - before if before is not None else 0.0)
    engine.log.committed(step)
    engine.required_epoch = max(engine.required_epoch, commit.epoch)
    if engine.pending and engine.pending.epoch <= engine.required_epoch:
        engine.activate(engine.pending)
    replicator.look_after_the_repeated(engine)


def meet_root(engine: "Engine", old: Plan | None) -> None:
    """A new root decides nothing before it has heard which commits the others know from the root before it."""
    plan = engine.plan
    assert plan is not None
    others = plan.worker_ids() - {engine.worker}
    if plan.at(ROOT).owner != engine.worker:
        engine.unheard = set()
        introduce(engine)
        return
    if old is None or old.at(ROOT).owner == engine.worker:
        engine.unheard &= others
        newcomers = others - (old.worker_ids() if old else others)
    else:
        engine.unheard, engine.root_since, engine.committed_at = set(others), plan.epoch, None
        newcomers = others
    for step, commit in engine.ledger.latest():
        tell_commit(engine, step, commit, sorted(newcomers))
        if newcomers == others:
            tell_coordinator(engine, step, commit)


def introduce(engine: "Engine") -> None:
    """Tell the root which commits are known here; in one frame, so that it never hears only a part."""
    assert engine.plan is not None
    engine.send(engine.plan.at(ROOT).owner, engine.frame(Address(Kind.HEARD, *ROOT, 0), meta=engine.ledger.latest()))


def heard(engine: "Engine", worker: WorkerId, frame: Frame) -> None:
    """A worker told this root all that it knows of the roots before."""
    engine.learn(frame.meta)
    if frame.epoch >= engine.root_since:
        engine.unheard.discard(worker)
