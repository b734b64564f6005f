"""What the loss of a worker has cost a job so far, in its own time. Pure functions of the state."""

from statistics import fmean
from typing import Final

from bamboo_core.coordinator.grids.choosing import usual_refill
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.spec import wanted_workers

USUAL_PAUSE: Final = 1.0  # seconds of a takeover, before there was any


def loss_seconds(state: CoordinatorState) -> float:
    """Seconds for which the whole job trains nothing, for each loss: the pause of a takeover, the steps that are done
    again after a checkpoint, and the time until another worker comes, as far as the job is slower meanwhile.

    On a fixed grid a neighbour runs two stages until then, and all wait for it: half of that time is lost. Where the
    grid is chosen there is one worker less, which is not paid for either.
    """
    done = state.moves.takeovers
    pause = fmean((t.decide_ms + t.reform_ms + t.recompute_ms) / 1000 for t in done) if done else USUAL_PAUSE
    losses = max(1, state.membership.preemptions)
    repeated = state.checkpoints.counts.repeated_seconds / losses
    slower = 1 / wanted_workers(state.spec) if state.spec.elastic.chooses_grid else 0.5
    return pause + repeated + slower * usual_refill(state)
