"""The final weights: each stage is written by one worker, and then one worker makes the folder of all of them.

Until that is done nothing is in the folder, so it never holds a part of the weights, or stages of two savings: one that
was begun before the job went back to a checkpoint has another number, and is never made the folder's content. What was
written of one that is given up as the job ends is removed by the workers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from bamboo_core.control.weights import CommitWeights, Save, Saved, WeightsCommitted
from bamboo_core.coordinator.checkpointing.checkpoints import first_number
from bamboo_core.coordinator.ending.finish import complete
from bamboo_core.coordinator.ending.record import WeightsSaving
from bamboo_core.coordinator.events import Outcome, Send
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.planning.plan import Cell, WorkerId

SAVE_SECONDS: Final = 3600.0  # in which some worker has to be asked for something new; a full disk may be emptied


def ask_to_save(turn: Turn) -> None:
    """For each stage that is not written yet, then for the folder; who is asked is asked once."""
    state = turn.state
    assert state.terms.save_path is not None
    writers = _writers(state)
    saving = state.ending.saving or WeightsSaving(
        number=first_number(state.terms.secret, turn.now), stages=len(writers)
    )
    about: dict[str, Any] = {"path": state.terms.save_path, "number": saving.number, "stages": len(writers)}
    if missing := {stage: worker for stage, worker in writers.items() if stage not in saving.written}:
        new = {stage: worker for stage, worker in missing.items() if saving.asked.get(stage) != worker}
        asked = replace(saving, asked={**saving.asked, **new})
        turn.do(*(Send(worker, Save(stage=stage, **about)) for stage, worker in new.items()))
    else:
        worker = next((w for w in (*writers.values(), *state.ready) if w in state.workers), writers[0])
        asked = replace(saving, committing=worker)
        if asked != saving:
            turn.do(Send(worker, CommitWeights(**about)))
    if asked != state.ending.saving:
        turn.enter("Saving")  # the time limit starts anew
        turn.put(replace(turn.state.ending, saving=asked))


def _writers(state: CoordinatorState) -> dict[int, WorkerId]:
    """Who finished a stage of the first pipeline, or who owns it if that one is lost."""
    plan = state.current_plan
    found = {stage: plan.at(Cell(0, stage)).owner for stage in range(len(plan.stages))}
    for cell, worker in state.ending.finishers.items():
        if cell.pipeline == 0 and cell.stage in found and worker in state.workers:
            found[cell.stage] = worker  # a plan that waits for a step boundary stays without effect now
    return found


def _saved(turn: Turn, worker: WorkerId, message: Saved) -> None:
    saving, plan = turn.state.ending.saving, turn.state.plan
    if saving and plan and message.number == saving.number and message.stage < len(plan.stages):
        written = replace(saving, written=saving.written | {message.stage})
        turn.put(replace(turn.state.ending, saving=written))


def _committed(turn: Turn, worker: WorkerId, message: WeightsCommitted) -> None:
    saving = turn.state.ending.saving
    if saving and saving.committing and message.number == saving.number:
        complete(turn)


def check_deadline(turn: Turn) -> None:
    if turn.state.phase == "Saving" and turn.now - turn.state.course.since > SAVE_SECONDS:
        turn.finish(Outcome.FAILED, "SaveTimeout", f"the workers did not save within {SAVE_SECONDS:g} s")


HANDLERS: Final[Mapping[type, Callable[[Turn, WorkerId, Any], None]]] = {Saved: _saved, WeightsCommitted: _committed}
