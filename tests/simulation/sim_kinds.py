"""Kinds of scenarios: what a job has, or what befalls it, beyond the usual. Any of them go together."""

from collections.abc import Iterable
from enum import StrEnum


class Kind(StrEnum):
    """A flag of simulate.py; `help` says what it is."""

    help: str

    def __new__(cls, name: str, help: str) -> "Kind":
        kind = str.__new__(cls, name)
        kind._value_, kind.help = name, help
        return kind

    RESTARTS = "restarts", "the coordinator restarts, too"
    ELASTIC = "elastic", "the number of pipelines may change"
    CHECKPOINTS = "checkpoints", "the job has some, and more often loses what only they bring back"
    RESPLIT = "resplit", "the number of stages follows the workers"
    GRIDS = "grids", "stages and pipelines are chosen, of all that the workers can run"
    VALUE = "value", "as with grids, workers cost unlike, and those that add less than they cost are given back"
    REPLICAS = "replicas", "there are several of each state, and neighbours or zones are lost at once"
    STRAGGLERS = "stragglers", "workers are slow for a time or for good, and layers take other times than was counted"
    SIBLINGS = "siblings", "several pipelines, whose workers share what is lost"
    ZBH1 = "zbh1", "weight gradients are postponed"
    SCHEDULES = "schedules", "the schedule changes again and again while the job runs"
    STOPS = "stops", "an evaluation or a decision ends the job early"
    DEVICES = "devices", "what is sent has to be copied from a device, which takes a while"
    NODES = "nodes", "nodes have several workers, and are lost with all of them"
    CALLBACKS = "callbacks", "a callback is told of every step, and workers die while they write what it keeps"
    DIVIDED = "divided", "workers have several devices, and run their stage in as many parts"


def flags(kinds: Iterable[Kind]) -> str:
    """The flags of these kinds as simulate.py takes them, each after a space."""
    return "".join(f" --{kind}" for kind in kinds)
