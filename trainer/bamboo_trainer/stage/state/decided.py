"""What a task's decisions said last, as a part of the state: so what they say next follows from the job.

Each layer has it, so that any split finds it, and which of its own parameters are frozen. A state that was kept without
it, as by a job without decisions, is one of which they have been told nothing.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from bamboo_trainer.decisions import Number
from bamboo_trainer.frames.payloads import Decided

KIND: Final = "decided"  # names are "decided:3.learning_rate", "decided:3.memory.plateau.best"
_FROZEN: Final = "frozen."
_STOP: Final = "stop."
_MEMORY: Final = "memory."
_RATE: Final = "learning_rate"


def is_of(name: str) -> bool:
    """Is a number of that name one of these?"""
    return name.startswith(f"{KIND}:")


def numbers(decided: Decided, frozen: Mapping[str, Collection[int]], layers: Collection[int]) -> dict[str, Number]:
    """By name, for the state of each of these layers. frozen: the layers that use each frozen parameter."""
    said: dict[str, Number] = {_RATE: decided.learning_rate}
    said |= {f"{_STOP}{name}": True for name in decided.stops}
    said |= {f"{_MEMORY}{name}.{key}": v for name, memory in decided.memory.items() for key, v in memory.items()}
    found = {f"{KIND}:{layer}.{key}": value for layer in layers for key, value in said.items()}
    return found | {f"{KIND}:{layer}.{_FROZEN}{name}": True for name, using in frozen.items() for layer in using}


def of_numbers(given: Mapping[str, Any], layers: Collection[int]) -> Decided | None:
    """None if nothing was decided. Raises ValueError if they are not of one decision for all these layers."""
    frozen: set[str] = set()
    found: list[dict[str, Any]] = []
    for layer in layers:
        start = f"{KIND}:{layer}."
        own = {name.removeprefix(start): value for name, value in given.items() if name.startswith(start)}
        frozen |= {key.removeprefix(_FROZEN) for key in own if key.startswith(_FROZEN)}
        found.append({key: value for key, value in own.items() if not key.startswith(_FROZEN)})
    if any(one != found[0] for one in found):
        raise ValueError("the layers' states have different decisions")
    if not found or not found[0]:
        return None
    rate = found[0].get(_RATE)
    if type(rate) is not float or not math.isfinite(rate) or rate < 0:
        raise ValueError(f"the learning rate's factor must be a finite number that is not negative, got {rate!r}")
    memory: dict[str, dict[str, Number]] = {}
    for key, value in found[0].items():
        if key.startswith(_MEMORY):
            name, _, kept = key.removeprefix(_MEMORY).partition(".")
            memory.setdefault(name, {})[kept] = value
    return Decided(
        learning_rate=rate,
        frozen=tuple(sorted(frozen)),
        stops=tuple(sorted(key.removeprefix(_STOP) for key in found[0] if key.startswith(_STOP))),
        memory=memory,
    )
