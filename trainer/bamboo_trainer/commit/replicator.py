"""Replicas: what owners send them, what they answer, and how a state is caught up."""

from typing import TYPE_CHECKING

from torch import Tensor

from bamboo.plan import Cell, Plan, WorkerId
from bamboo.protocol import LeftBehind, ReplicaSynced
from bamboo_trainer.commit.replica_progress import Feed, Owed
from bamboo_trainer.engine.cell_step import Run
from bamboo_trainer.transport.frames import ANSWERS_END, Address, Frame, Kind
from bamboo_trainer.transport.payloads import Announce, Refused, State

if TYPE_CHECKING:
    from bamboo_trainer.engine.engine import Engine


def finalize(engine: "Engine", stage: int, step: int, gradient: Tensor) -> None:
    """The final gradients of a step are known: for our own optimizer step, and for the replicas.

    They come from a cell of ours, or, if none of them runs this step, from the owner whose replica we are.
    """
    holding = engine.holdings[stage]
    if step < holding.version or step in holding.reduced:
        return
    holding.reduced[step] = gradient
    for (cell, replica), feed in engine.feeds.items():
        if cell.stage == stage and feed.since is not None and feed.since <= step:
            engine.send(replica, sync(engine, cell, step))


def synced(engine: "Engine", address: Address, gradient: Tensor) -> None:
    """The final gradients of a stage that we hold have arrived."""
    stage = engine.holdings[address.stage].stage
    if stage and gradient.numel() != stage.size:
        raise Refused(f"a gradient of {gradient.numel()} elements, expected {stage.size}")
    finalize(engine, address.stage, address.step, gradient)
    announce(engine, address.stage)


def sync(engine: "Engine", cell: Cell, step: int) -> Frame:
    """The final gradients of a step that we hold, for somebody with a part in that cell.

    With them go the commits that they follow from: a replica that is being filled may have missed those, and nobody
    waits for it.
    """
    gradient = engine.holdings[cell.stage].reduced[step]
    return engine.frame(Address(Kind.SYNC, *cell, step), (gradient,), engine.ledger.latest())


def announce(engine: "Engine", stage: int) -> None:
    """Tell the owners of the cells that we replicate which version we hold."""
    assert engine.plan is not None
    holding = engine.holdings[stage]
    first = holding.stage is not None and holding.version == 0
    digest = holding.stage.digest() if first and holding.stage else ""
    for cell in engine.plan.replicated_by(engine.worker):
        if cell.stage == stage:
            secured = holding.version + (holding.version in holding.reduced)
            meta = Announce(version=holding.version, secured=secured, digest=digest)
            engine.send(engine.plan.at(cell).owner, engine.frame(Address(Kind.ANNOUNCE, *cell, 0), meta=meta))


def announced(engine: "Engine", cell: Cell, replica: WorkerId, version: int, digest: str) -> None:
    stage = engine.holdings[cell.stage].stage
    if stage is None:
        return
    feed = engine.feeds[(cell, replica)]
    same = not (version == 0 and stage.version == 0) or digest == stage.digest()
    owe(engine, cell, replica, feed.announced(version, stage.version, same))
    if feed.caught_up(stage.version):
        engine.tell(ReplicaSynced(cell=cell, replica=replica))


def owe(engine: "Engine", cell: Cell, replica: WorkerId, owed: Owed) -> None:
    holding = engine.holdings[cell.stage]
    stage = holding.stage
    if stage is None or owed is Owed.NOTHING:
        return
    if owed is Owed.STATE:
        give_state(engine, cell, replica)
    if stage.version in holding.reduced:
        engine.send(replica, sync(engine, cell, stage.version))


def give_state(engine: "Engine", cell: Cell, worker: WorkerId) -> None:
    stage = engine.holdings[cell.stage].stage
    assert stage is not None
    tensors, facts = stage.snapshot()
    meta = State(state=facts, generation=engine.generation(stage.version), commits=engine.ledger.latest())
    engine.send(worker, engine.frame(Address(Kind.STATE, *cell, stage.version), tensors, meta))


def restore(engine: "Engine", address: Address, frame: Frame) -> None:
    holding = engine.holdings[address.stage]
    if holding.version >= address.step or engine.plan is None:
        return
    stage = holding.stage or engine.build(address.stage, engine.plan.stages)
    try:
        stage.restore(frame.tensors, frame.meta.state)
    except ValueError as error:
        raise Refused(str(error)) from error
    holding.stage = stage
    holding.give(holding.owned, engine.on_host)
    holding.reduced = {k: g for k, g in holding.reduced.items() if k >= stage.version and g.numel() == stage.size}
    engine.ledger.generations.setdefault(stage.version, frame.meta.generation)
    engine.shadows = {c: shadow for c, shadow in engine.shadows.items() if c.stage != address.stage}
    for run in [r for r in engine.runs.values() if r.cell.stage == address.stage]:
        engine.begin(run)
    for (cell, replica), feed in engine.feeds.items():
        if cell.stage == address.stage:  # NB: the gradients that were skipped never pass by here
            owe(engine, cell, replica, feed.relinked(stage.version))
    announce(engine, address.stage)


def look_after_the_repeated(engine: "Engine") -> None:
    """Owners that repeat a committed step: its result may exist elsewhere, or what it takes may be gone."""
    plan = engine.plan
    assert plan is not None
    for run in engine.runs.values():
        holding = engine.holdings[run.cell.stage]
        repeats = run.program and run.step in engine.ledger.commits and run.step not in holding.reduced
        if not repeats or run.predecessor is not None:
            continue
        if run.asked != plan.epoch:
            run.asked = plan.epoch
            run.answers.clear()
            for worker in sorted(plan.worker_ids() - {engine.worker}):
                engine.send(worker, engine.frame(Address(Kind.ASK, *run.cell, run.step)))
        if run.step < engine.ledger.newest or _lacks_what_is_gone(engine, run):
            engine.tell(LeftBehind(cell=run.cell))


def asked(engine: "Engine", worker: WorkerId, cell: Cell, step: int) -> None:
    """Give the owner of a cell that repeats a committed step all that may help."""
    holding = engine.holdings.get(cell.stage)
    if holding and holding.version > step:
        give_state(engine, cell, worker)
    elif holding and step in holding.reduced:
        engine.send(worker, sync(engine, cell, step))
    for frame in engine.log.to(cell):
        engine.send(worker, engine.again(frame))
    since = [(run.cell, run.since) for run in engine.runs.values()]
    for kind in ANSWERS_END:
        engine.send(worker, engine.frame(Address(kind, *cell, step), meta=since))


def answered(engine: "Engine", worker: WorkerId, frame: Frame) -> None:
    """All that a worker had for the cell that asked has arrived, on one of its links."""
    run = engine.runs[frame.address.cell]
    if frame.address.step == run.step and frame.epoch == run.asked:
        run.answers[worker, frame.address.kind] = dict(frame.meta)
        look_after_the_repeated(engine)


def _lacks_what_is_gone(engine: "Engine", run: Run) -> bool:
    """Everybody has answered: does the rest of the step need a frame that nobody has, nor will make again?"""
    plan = engine.plan
    assert plan is not None
    links = {(w, kind) for w in plan.worker_ids() - {engine.worker} for kind in ANSWERS_END}
    if not links <= run.answers.keys():
        return False
    since = {cell: first for answer in run.answers.values() for cell, first in answer.items()}
    since |= {own.cell: own.since for own in engine.runs.values()}
    d, s = run.cell
    for address in engine.needed(run, run.program[run.done :]):
        sender = {Kind.ACTIVATION: s - 1, Kind.GRADIENT: s + 1, Kind.TIED: address.part}.get(address.kind)
        if address not in run.inbox and sender is not None and since.get(Cell(d, sender), 0) > run.step:
            return True
    return False


def set_feeds(engine: "Engine", plan: Plan, old: Plan | None) -> None:
    was_mine = set(old.owned_by(engine.worker)) if old else set()
    engine.feeds = {
        (cell, replica): engine.feeds.get((cell, replica), Feed()) if cell in was_mine else Feed()
        for cell in plan.owned_by(engine.worker)
        for replica in plan.at(cell).replicas
    }
