"""The messages that put the final weights into their folder. number: unique among a job's savings of weights. The
coordinator asks for each stage, then for the folder; see `bamboo_core.coordinator.ending.weights`.
"""

from bamboo_core.control.message import Count, Message


class Save(Message, frozen=True):
    """Write one of `stages` stages' final weights for the folder at `path`."""

    stage: Count
    stages: Count
    path: str
    number: Count


class Saved(Message, frozen=True):
    """The stage's final weights are written."""

    stage: Count
    number: Count


class CommitWeights(Message, frozen=True):
    """Complete the folder: the final weights of all stages are written."""

    path: str
    stages: Count
    number: Count


class WeightsCommitted(Message, frozen=True):
    """The folder holds the final weights of that saving, and nothing else."""

    number: Count
