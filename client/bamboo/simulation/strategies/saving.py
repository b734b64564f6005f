"""How often checkpoints are taken, and whether a change pays before the next loss. Pure."""

import math

from bamboo.simulation.strategies.costs import SNAPSHOT_BYTES, Costs
from bamboo.simulation.strategies.policy import Saving


def young_daly(costs: Costs, stages: int, mtbf: float) -> Saving:
    """The interval of Young (1974) and Daly (2006): sqrt(2 x pause x mtbf), but at least what writing takes. Training
    pauses while a stage's state is copied to host memory, and goes on while that is written. mtbf: seconds between two
    losses that make the job go back.
    """
    state, storage = costs.stage(stages).state, costs.profile.storage
    pause, delay = state / SNAPSHOT_BYTES, storage.latency + state / storage.write
    return Saving(every=max(math.sqrt(2 * pause * mtbf), delay, 1.0), pause=pause, delay=delay)


def blocking(costs: Costs, stages: int, mtbf: float) -> Saving:
    """The interval of `young_daly` for checkpoints during which training stops until they are in the store, as
    `torch.save` and the `save_checkpoint` of Megatron-LM and DeepSpeed do it if nothing is said about it.
    """
    storage = costs.profile.storage
    pause = storage.latency + costs.stage(stages).state / storage.write
    return Saving(every=max(math.sqrt(2 * pause * mtbf), 1.0), pause=pause, delay=0.0)


def pays(rate: float, new: float, stall: float, mtbf: float) -> bool:
    """Whether a stall is won back, by being faster, until the next loss."""
    return new * max(0.0, mtbf - stall) > rate * mtbf
