"""A plan comes into force: roles, promotions, re-sent frames; and what a broken or re-formed link means."""

from dataclasses import replace
from typing import TYPE_CHECKING

from bamboo.plan import ROOT, Cell, Plan, WorkerId
from bamboo.protocol import PeerDown, PlanApplied
from bamboo_trainer.commit import committer, replicator, state_comparison
from bamboo_trainer.engine.cell_step import Catching, Run
from bamboo_trainer.stage.stage_states import Holding

if TYPE_CHECKING:
    from bamboo_trainer.engine.engine import Engine


def activate(engine: "Engine", plan: Plan, arrived: float) -> None:
    """Obey a plan from now on. arrived: when it came, seconds of the engine's clock."""
    old = engine.plan
    engine.plan = plan
    if engine.pending and engine.pending.epoch <= plan.epoch:
        engine.pending = None
    engine.transport.peers({p.worker: (p.host, p.port) for p in plan.workers if p.worker != engine.worker})
    take_roles(engine, plan, old)
    engine.down &= plan.worker_ids()
    for cell in [c for c in engine.runs if plan.at(c).owner != engine.worker] if old else []:
        cede(engine, cell)
    if not plan.boundary:
        for run in engine.runs.values():
            run.predecessor = None
    replicator.set_feeds(engine, plan, old)
    for run in engine.runs.values():
        if run.layout is None:
            engine.begin(run)
    for cell in plan.owned_by(engine.worker):
        if cell not in engine.runs:
            promote(engine, cell, old, arrived)
    for cell in plan.cells() if old else []:
        if old and cell.pipeline < len(old.pipelines) and plan.at(cell).owner != old.at(cell).owner:
            resend(engine, cell)
    engine.pace.restart(engine.step)
    kept = {c for c in plan.replicated_by(engine.worker) if plan.at(c).shadow == engine.worker}
    engine.shadows = {c: shadow for c, shadow in engine.shadows.items() if c in kept}
    committer.meet_root(engine, old)
    for stage in engine.holdings:
        replicator.announce(engine, stage)
        state_comparison.look(engine, stage)
    replicator.look_after_the_repeated(engine)
    engine.tell(PlanApplied(epoch=plan.epoch))
    orphans, engine.orphans = engine.orphans, []
    for sender, frame in orphans:
        engine.take(sender, frame)


def take_roles(engine: "Engine", plan: Plan, old: Plan | None) -> None:
    """Keep the state of the stages that this worker has a part in.

    Who owns a cell in the first plan that it hears of owns it from the job's beginning, and builds its first state.
    """
    owned = {c.stage for c in plan.owned_by(engine.worker)}
    replicated = {c.stage for c in plan.replicated_by(engine.worker)}
    for stage in [s for s in engine.holdings if s not in owned | replicated]:
        del engine.holdings[stage]
    for cell in [c for c in engine.runs if c.pipeline >= len(plan.pipelines)]:
        del engine.runs[cell]
    for stage in sorted(owned | replicated):
        if stage not in engine.holdings:
            begins = old is None and (plan.epoch == 1 or stage in owned)
            assert begins or stage not in owned, f"{engine.worker} is to own stage {stage} and has no state of it"
            engine.holdings[stage] = Holding(engine.build(stage, plan.stages) if begins else None)
        engine.holdings[stage].give(stage in owned, engine.on_host)


def cede(engine: "Engine", cell: Cell) -> None:
    """Somebody else runs the cell from now on, and may still need its last gradients."""
    run = engine.runs.pop(cell)
    engine.left[cell] = (run.since, run.step)
    if cell.stage in engine.holdings:
        step, reduced = engine.ledger.newest, engine.holdings[cell.stage].reduced
        if step in reduced:
            engine.ceded[cell] = replicator.sync(engine, cell, step)


def promote(engine: "Engine", cell: Cell, old: Plan | None, arrived: float) -> None:
    """This worker owns the cell from now on; its state stands where the replica stands."""
    assert engine.plan is not None
    run = engine.runs[cell] = Run(cell)
    if old is not None and engine.plan.boundary and cell.pipeline < len(old.pipelines):
        run.predecessor = old.at(cell).owner
    engine.begin(run)
    first, last = engine.left.pop(cell, (run.step, -1))
    run.since = first if run.step <= last else run.step  # NB: the log keeps what this worker sent when it ran the cell
    if cell in engine.shadows:
        run.adopt(engine.shadows[cell])
    if old is not None:
        now = engine.clock()
        run.catching = Catching(arrived, now, now)
        if engine.plan.boundary and run.step > engine.ledger.newest:
            engine.caught_up(run)  # a move at the boundary, and nothing is owed


def link_down(engine: "Engine", peer: WorkerId) -> None:
    """The link to that peer broke."""
    if engine.plan is None or peer not in engine.plan.worker_ids():
        return
    engine.down.add(peer)
    engine.tell(PeerDown(peer=peer))
    for run in engine.runs.values():
        if run.predecessor == peer:
            run.predecessor = None  # what it owed may be lost; the step can be repeated


def relink(engine: "Engine", peer: WorkerId) -> None:
    """The link to that peer stands again; whatever was on its way is sent once more."""
    if engine.plan is None or peer not in engine.plan.worker_ids():
        return
    for cell, frame in engine.ceded.items():
        if engine.plan.at(cell).owner == peer:
            engine.send(peer, replace(frame, epoch=engine.plan.epoch))
    for cell in engine.plan.cells():
        if engine.plan.at(cell).owner == peer:
            resend(engine, cell)
    for run in engine.runs.values():
        run.asked = None
    replicator.look_after_the_repeated(engine)
    if ROOT in engine.runs:
        for step, commit in engine.ledger.latest():
            committer.tell_commit(engine, step, commit, [peer])
    elif engine.plan.at(ROOT).owner == peer:
        committer.introduce(engine)
    for stage in engine.holdings:
        replicator.announce(engine, stage)
    for (cell, replica), feed in engine.feeds.items():
        if replica == peer:
            replicator.owe(engine, cell, replica, feed.relinked(engine.holdings[cell.stage].version))


def resend(engine: "Engine", cell: Cell) -> None:
    """Send a cell's owner again what the log has for it; what it has already, it drops."""
    assert engine.plan is not None
    for frame in engine.log.to(cell):
        engine.send(engine.plan.at(cell).owner, engine.again(frame))
