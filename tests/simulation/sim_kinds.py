"""Kinds of scenarios: features of a job or of its faults that can be combined."""

from collections.abc import Iterable
from enum import StrEnum


class Kind(StrEnum):
    """A kind of scenario. Its value is the name of its flag in simulate.py, whose help text is `help`."""

    help: str

    def __new__(cls, name: str, help: str) -> "Kind":
        kind = str.__new__(cls, name)
        kind._value_, kind.help = name, help
        return kind

    RESTARTS = "restarts", "the coordinator restarts, too"
    ELASTIC = "elastic", "the number of pipelines may change"
    CHECKPOINTS = "checkpoints", "the job has checkpoints, and often loses states that only they bring back"
    RESPLIT = "resplit", "the number of stages follows the workers"
    GRIDS = "grids", "the coordinator chooses stages and pipelines"
    VALUE = "value", "as grids, with prices: workers that add less than they cost are given back"
    REPLICAS = "replicas", "each state has several replicas, and neighbours or zones are lost at once"
    STRAGGLERS = "stragglers", "workers are slow for a time or for good, and layer times differ from the counted ones"
    SIBLINGS = "siblings", "several pipelines, whose workers share a lost cell"
    ZBH1 = "zbh1", "weight gradients are postponed"
    SCHEDULES = "schedules", "the schedule changes again and again while the job runs"
    STOPS = "stops", "an evaluation or a decision ends the job early"
    DEVICES = "devices", "boundary tensors are copied from a device before they are sent"
    NODES = "nodes", "nodes have several workers, which are lost together"
    CALLBACKS = "callbacks", "a callback follows every step, and workers die while they write its state or the history"
    DIVIDED = "divided", "workers have several devices, each of which runs a part of the stage"


def flags(kinds: Iterable[Kind]) -> str:
    """Return the flags of these kinds as simulate.py takes them, each after a space."""
    return "".join(f" --{kind}" for kind in kinds)
