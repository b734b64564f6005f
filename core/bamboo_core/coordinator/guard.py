"""The guard against silent data corruption by a worker's processor or memory, and against nondeterministic tasks.

With `training.deterministic`, all holders of a stage report checksums of its state, at intervals, for each checkpoint
and at the end; these must be equal. Spot checks repeat a microbatch and must get the same bits. After the first
difference the job goes back to a checkpoint from before it, or to step 0, if it can; else, and after a second one, it
ends. See docs/design/determinism.md.
"""

from collections.abc import Mapping
from typing import Final

from bamboo_core.control.protocol import SpotCheckDiffers, StateSums
from bamboo_core.coordinator.checkpointing import restoring, saving
from bamboo_core.coordinator.events import Emit, Outcome, RestoreCause
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import Turn
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_core.text import one_line

CAUSES: Final = (
    "usual causes: a layer, its factory or the optimizer uses random numbers of Python or numpy, the time, the order "
    "of a set, or something kept from an earlier call; the workers' hardware or images differ; a worker's memory or "
    "processor gives wrong bits"
)


def state_sums(turn: Turn, worker: WorkerId, message: StateSums) -> None:
    """Record a worker's checksums of a stage's state; call `_differs` if an earlier report differs."""
    state, plan, stage, version = turn.state, _plan(turn), message.stage, message.version
    training = state.spec.training
    if plan is None or stage >= len(plan.stages) or version > training.steps or not training.deterministic:
        return
    known = state.guard.at(plan.origin, stage, version)
    if known is None or known.sums == message.sums:
        writing = state.checkpoints.writing
        kept = writing.step if writing else None
        turn.put(state.guard.reporting(plan.origin, (stage, version), worker, message.sums, kept))
        return
    when = f"after {version} steps" if version else "as it was built"
    first = f"first difference: {_first_difference(known.sums, message.sums)}"
    if worker in known.equal:
        text = f"{worker} holds other bits of stage {stage} {when} than it told before"
    else:
        text = f"{worker} and {known.first} hold other bits of stage {stage} {when}"
    _differs(turn, f"{text}; {first}", version - 1)


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    return next((one_line(name) for name in one if one[name] != other.get(name)), "the number of tensors")


def spot_check(turn: Turn, worker: WorkerId, message: SpotCheckDiffers) -> None:
    """Handle a worker's report that it repeated a microbatch and got other bits than the cell's owner."""
    plan = _plan(turn)
    if plan is not None and plan.has(message.cell) and message.step < turn.state.spec.training.steps:
        _differs(turn, one_line(message.message), message.step)


def _plan(turn: Turn) -> Plan | None:
    """Return the newest plan; None if the job has none, goes back to an earlier state, or is over."""
    return turn.state.plan if turn.state.phase in ("Running", "Recovering") else None


def _differs(turn: Turn, text: str, newest_good: int) -> None:
    """Go back to a state from before a difference. End the job if it keeps no checkpoints, or at its second
    difference. newest_good: the newest version from before the difference.
    """
    turn.put(replace(turn.state.guard, reported={}, differences=turn.state.guard.differences + 1))
    if turn.state.spec.checkpoint is None:
        turn.finish(Outcome.FAILED, "ResultsDiffer", f"{text}; the job keeps no checkpoints to go back to; {CAUSES}")
    elif turn.state.guard.differences > 1:
        turn.finish(Outcome.FAILED, "ResultsDiffer", f"{text}; the job had gone back once for such a cause; {CAUSES}")
    else:
        turn.do(Emit("ResultsDiffer", text, True))
        saving.never_restore(turn, newest_good)
        restoring.go_back(turn, RestoreCause.RESULTS_DIFFER, text)
