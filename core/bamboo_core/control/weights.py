"""The messages by which the final weights get into their folder. number: of the saving; each of a job has another one.

The coordinator asks for each stage, and then for the folder; see `bamboo_core.coordinator.ending.weights`.
"""

from bamboo_core.control.message import Count, Message


class Save(Message, frozen=True):
    """Write that stage's final weights, for that folder; there are so many stages."""

    stage: Count
    stages: Count
    path: str
    number: Count


class Saved(Message, frozen=True):
    """The stage's final weights are written, for the saving of that number."""

    stage: Count
    number: Count


class CommitWeights(Message, frozen=True):
    """The coordinator asks for the folder of the final weights: all stages, so many of them, are written for that
    saving.
    """

    path: str
    stages: Count
    number: Count


class WeightsCommitted(Message, frozen=True):
    """The folder holds the final weights of that saving, and nothing else."""

    number: Count
