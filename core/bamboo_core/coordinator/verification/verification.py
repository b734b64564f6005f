"""Results that have to be the same and are not: silent corruption of one of them.

Shadows compare forwards. A difference is put down to a worker by what all say
of it (`evidence`). With `redundancy.verify` Replace that worker is lost, and the job goes back to a checkpoint from
before, and repeats the step: if it could not be told who was wrong, that is told by what the step comes to then.
See docs/design/verify.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from bamboo_core.control.verification import (
    MOST_QUESTIONS,
    ForwardDiffers,
    ForwardSum,
    LookAgain,
)
from bamboo_core.coordinator.checkpoint_counts import RestoreCause
from bamboo_core.coordinator.checkpointing import checkpoints, restoring
from bamboo_core.coordinator.events import Emit, Outcome, Send
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.coordinator.verification.evidence import (
    Dispute,
    Place,
    Sums,
    layers_of,
    none_is_steady,
    wrong_workers,
)
from bamboo_core.coordinator.workers.membership import declare_lost
from bamboo_core.job.placement_spec import VerifyMode
from bamboo_core.planning.plan import Plan, WorkerId

MOST_RETURNS: Final = 4  # to a checkpoint, for the same result
PAST_STEPS: Final = 2  # after which nobody says more of a step


def is_on(state: CoordinatorState) -> bool:
    return state.spec.redundancy.verify is not VerifyMode.NONE


def replaces(state: CoordinatorState) -> bool:
    return state.spec.redundancy.verify is VerifyMode.REPLACE


# what workers say


def forward_differs(turn: Turn, worker: WorkerId, message: ForwardDiffers) -> None:
    """A shadow's forward came to another result than the owner's."""
    plan, place = _plan(turn.state), message.place
    if plan is None or not plan.has(place.cell) or message.owner not in turn.state.workers:
        return
    said: Sums = {
        message.owner: (message.theirs,),
        worker: (message.mine, *((message.again,) if message.again else ())),
    }
    _differs(turn, place, said, message.owner)


def forward_sum(turn: Turn, worker: WorkerId, message: ForwardSum) -> None:
    """What a forward came to when it was repeated: by all after the job went back, or at once by its owner."""
    if _plan(turn.state) is not None:
        _hear(turn, message.place, {worker: (message.sum,)})


def _plan(state: CoordinatorState) -> Plan | None:
    """The one in force, if results are compared now."""
    return state.plan if is_on(state) and state.phase == "Running" and state.plan and not state.plan.mixed else None


# differences


def _differs(turn: Turn, place: Place, said: Sums, suspect: WorkerId) -> None:
    """A difference is found; suspect: the owner, who goes first if nobody can be told to be wrong."""
    state = turn.state
    _count(turn, place, said)
    dispute = state.verification.dispute_over(place)
    if dispute is None:
        layers = layers_of(state.current_plan, place)
        assert layers is not None
        dispute = Dispute(place=place, layers=layers, suspect=suspect)
    dispute = dispute.having(said)
    wrong = wrong_workers(dispute.said)
    if not replaces(state):
        if wrong:
            _settle(turn, dispute, wrong)
        else:
            turn.put(turn.state.verification.with_dispute(dispute))  # more may be said of it
    elif none_is_steady(dispute.said) and dispute.returns:
        text = f"{place} came to other results whenever it was repeated, on all workers"
        turn.finish(Outcome.FAILED, "NotDeterministic", text)
    elif wrong:
        harmless = _is_harmless(dispute, wrong)
        _settle(turn, dispute, wrong)
        if not harmless:
            _go_back(turn, dispute, "the results since then may be wrong")
    else:
        _look_again(turn, dispute)


def _look_again(turn: Turn, dispute: Dispute) -> None:
    """It cannot be told who is wrong: by what the same work comes to again, or comes to elsewhere, it can."""
    if dispute.returns >= MOST_RETURNS:
        text = f"{dispute.place} still differs after the job went back to a checkpoint {MOST_RETURNS} times"
        turn.finish(Outcome.FAILED, "ResultsDiffer", f"{text}, and it cannot be told who is wrong")
        return
    out = frozenset({dispute.suspect} & turn.state.workers.keys()) if dispute.returns else frozenset[WorkerId]()
    again = replace(dispute, returns=dispute.returns + 1)
    turn.put(turn.state.verification.with_dispute(again))
    for worker in out:
        declare_lost(turn, worker, f"{dispute.place} differs again, and another worker has to run it", known=True)
    _go_back(turn, dispute, "what it comes to again will tell who is wrong")


def _go_back(turn: Turn, dispute: Dispute, why: str) -> None:
    """To a checkpoint of a state from before."""
    if turn.state.phase == "Over":
        return
    checkpoints.never_restore(turn, dispute.place.last_good)
    restoring.go_back(turn, RestoreCause.RESULTS_DIFFER, f"{dispute.place} differs; {why}")
    _ask(turn, turn.state.workers)


def _is_harmless(dispute: Dispute, wrong: frozenset[WorkerId]) -> bool:
    """Has nothing been used that those have computed? So it is with what was computed in advance."""
    return dispute.suspect not in wrong


def _hear(turn: Turn, place: Place, said: Sums) -> None:
    """Something more is known of an open dispute."""
    dispute = turn.state.verification.dispute_over(place)
    if dispute is None:
        return
    dispute = dispute.having(said)
    turn.put(turn.state.verification.with_dispute(dispute))
    wrong = wrong_workers(dispute.said)
    if wrong:
        _settle(turn, dispute, wrong)  # what is there now was computed anew, and others have found the same


def _settle(turn: Turn, dispute: Dispute, wrong: frozenset[WorkerId]) -> None:
    """It is known who was wrong: these are lost, if that is wished."""
    _close(turn, dispute)
    _name(turn, dispute, wrong)
    if not replaces(turn.state):
        return
    for worker in sorted(wrong & turn.state.workers.keys()):
        declare_lost(turn, worker, "its results are wrong", known=True)


def _close(turn: Turn, dispute: Dispute) -> None:
    turn.put(turn.state.verification.without_dispute(dispute.place))
    if replaces(turn.state):
        _ask(turn, turn.state.workers)


def _count(turn: Turn, place: Place, said: Sums) -> None:
    """Count a difference between these workers. People are told of one that stays, as in parameters, only once."""
    v, workers = turn.state.verification, tuple(sorted(said))
    key, text = (place.kind, place.stage, workers), f"{place} differs between {' and '.join(workers)}"
    turn.put(v.counted(place, workers, text))
    if key not in v.told or replaces(turn.state):
        turn.do(Emit("ResultsDiffer", text, True))


def _name(turn: Turn, dispute: Dispute, wrong: frozenset[WorkerId]) -> None:
    v, names = turn.state.verification, " and ".join(sorted(wrong))
    text = f"{names} was wrong about {dispute.place}: others agree, or it did not come to its own result again"
    unresolved = "" if replaces(turn.state) else f"{text}; redundancy.verify Report leaves it at that"
    new = tuple(worker for worker in sorted(wrong) if worker not in v.corrupt)
    turn.put(v.naming(new, unresolved=unresolved, resolved="" if unresolved else text))
    if new:
        turn.do(Emit("WorkerCorrupt", text, True))


# while time passes


def look_after(turn: Turn) -> None:
    """Ask those who have begun anew, weigh what nobody tells more of, and give up what is past."""
    state = turn.state
    v, plan = state.verification, _plan(state)
    if plan is None or not v.disputes:
        return
    if replaces(state) and v.asked != plan.origin:
        turn.put(v.asking(plan.origin))
        _ask(turn, plan.worker_ids())
    for dispute in turn.state.verification.disputes:
        if turn.state.phase == "Running" and _is_past(turn.state, plan, dispute):
            _give_up(turn, dispute)


def _is_past(state: CoordinatorState, plan: Plan, dispute: Dispute) -> bool:
    """Has the job passed it again, or can nobody run the same again?"""
    return layers_of(plan, dispute.place) != dispute.layers or state.step > dispute.place.step + PAST_STEPS


def _give_up(turn: Turn, dispute: Dispute) -> None:
    text = f"it cannot be told who was wrong about {dispute.place}; it is repeated, and the results are equal now"
    _close(turn, dispute)
    if not replaces(turn.state):
        return  # nothing was repeated, and people know of the difference
    turn.put(turn.state.verification.resolved_as(text))
    turn.do(Emit("CorruptionNotNamed", text, True))


def _ask(turn: Turn, workers: Iterable[WorkerId]) -> None:
    """To say what the forwards and states in question come to. Before the plan, too: with it they begin at once."""
    disputes = turn.state.verification.disputes
    places = tuple(one.place for one in disputes)[-MOST_QUESTIONS:]
    turn.do(*(Send(worker, LookAgain(places=places)) for worker in workers))


HANDLERS: Final[dict[type, Callable[[Turn, WorkerId, Any], None]]] = {
    ForwardDiffers: forward_differs,
    ForwardSum: forward_sum,
}
