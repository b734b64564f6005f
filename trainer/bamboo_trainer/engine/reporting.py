"""What a worker says of itself: to the coordinator all that matters, to a person what it waits for."""

from typing import TYPE_CHECKING

from bamboo.plan import ROOT
from bamboo.protocol import CellFinished, PeerDown, PlanApplied, ReplicaSynced, Report
from bamboo_trainer.commit import committer
from bamboo_trainer.engine.schedule import ReportReady

if TYPE_CHECKING:
    from bamboo_trainer.engine.engine import Engine


def report(engine: "Engine") -> None:
    """Say everything that the coordinator has to know: it may have been restarted, or messages may be lost."""
    for peer in sorted(engine.down):
        engine.tell(PeerDown(peer=peer))
    if engine.plan is None:
        engine.tell(Report(committed=engine.ledger.newest, held={}))  # NB: who asks waits for every answer
        return
    engine.tell(PlanApplied(epoch=engine.plan.epoch))
    for (cell, replica), feed in engine.feeds.items():
        if feed.synced:
            engine.tell(ReplicaSynced(cell=cell, replica=replica))
    held = {index: holding.version for index, holding in engine.holdings.items()}
    engine.tell(Report(committed=engine.ledger.newest, held=held))
    if ROOT in engine.runs:
        for step, commit in engine.ledger.latest():
            committer.tell_coordinator(engine, step, commit)
    for run in engine.runs.values():
        stage = engine.holdings[run.cell.stage].stage
        if run.finished and stage:
            engine.tell(CellFinished(cell=run.cell, digest=stage.digest()))


def waits_for(engine: "Engine") -> str:
    """Why there is no work right now, for a person."""
    for run in engine.runs.values():
        if run.predecessor is not None:
            return f"the last gradients of {run.cell} from {run.predecessor}"
        if run.next is None or run.layout is None:
            return f"the commit of step {run.step}" if run.step < engine.steps else "the others to finish"
        missing = [a for a in engine.needed(run, [run.next]) if a not in run.inbox]
        if missing:
            kind, d, s, step, m, _ = missing[0]
            return f"{kind.name} for stage {s} of pipeline {d}, step {step}, microbatch {m}"
        if isinstance(run.next, ReportReady):
            return f"a replica of stage {run.cell.stage} of pipeline {run.cell.pipeline}"
    return "a part"
