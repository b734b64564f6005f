"""Numbers in an optimizer's parameter groups that it changes from step to step, such as a count of steps.

They belong to the state like the optimizer's tensors. They are saved with each parameter, so that a stage of another
split can restore them; a group whose parameters then have different numbers is refused, because the optimizer depends
on the split. The task sets the learning rate and other scheduled values at every step.

Whether torch's fused kernel does the steps, where the task leaves that open, is such a number, too: a state without it
comes from a version that left the choice to torch, and continues with that kernel's bits.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import torch

from bamboo_trainer.stage.state.parameters import Slot
from bamboo_trainer.tasks.scheduled_optimizer import leaves_kernel_open
from bamboo_trainer.tasks.task_errors import TaskError

Scalar = int | float | bool | None
MARK: Final = "param_group."  # prefix of such a number's key
_OTHERS: Final = frozenset({"params", "param_names", "lr"})


class GroupNumbers:
    """The changing numbers of an optimizer's parameter groups. optimizer: before its first step; later differences are
    part of the state. scheduled: keys that are set at every step.
    """

    def __init__(
        self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer | None, scheduled: Collection[str] = ()
    ) -> None:
        self._others = _OTHERS.union(scheduled)
        self._groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
        self._first = [{k: deepcopy(v) for k, v in group.items() if k not in self._others} for group in self._groups]
        places = {id(p): number for number, group in enumerate(self._groups) for p in group["params"]}
        self._places = {s.name: places[id(s.parameter)] for s in slots if id(s.parameter) in places}

    def of(self, slot: str) -> dict[str, Scalar]:
        """Return a slot's changed numbers by key, with MARK. Raises TaskError for a value that is no number."""
        number = self._places.get(slot)
        return {} if number is None else self._changed(number)

    def of_all(self) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """Return what `of` returns for each slot, comparing every group once."""
        changed = {number: self._changed(number) for number in dict.fromkeys(self._places.values())}
        return ((slot, changed[number]) for slot, number in self._places.items())

    def _changed(self, number: int) -> dict[str, Scalar]:
        group, first, found = self._groups[number], self._first[number], dict[str, Scalar]()
        for key in sorted(group.keys() - self._others):
            value = group[key]
            if key in first and _same(value, first[key]):
                continue
            if value is not None and not isinstance(value, int | float):
                raise TaskError(
                    f"the optimizer changes {key!r} of its parameter groups, which is {type(value).__name__}, expected "
                    "plain numbers"
                )
            found[f"{MARK}{key}"] = value
        return found

    def checked(self, given: Mapping[str, Mapping[str, Scalar]]) -> list[dict[str, Scalar]]:
        """Return what `set` takes. given: of each slot, by key with MARK. Raises ValueError if a group's differ."""
        wanted: list[dict[str, Scalar] | None] = [None] * len(self._groups)
        witness: dict[int, str] = {}
        for slot, number in self._places.items():
            mine, known = dict(given.get(slot, {})), wanted[number]
            if known is None:
                wanted[number], witness[number] = mine, slot
            elif different := [k for k in known.keys() | mine.keys() if not _same(known.get(k), mine.get(k))]:
                raise ValueError(
                    f"{min(different).removeprefix(MARK)!r} of the optimizer's parameter group differs between "
                    f"{witness[number]} and {slot}: it depends on how the layers are split"
                )
        return [numbers or {} for numbers in wanted]

    def set(self, wanted: Sequence[Mapping[str, Scalar]]) -> None:
        """Set each group's numbers; other keys, and a kernel that the task names, become as before the first step."""
        for group, first, numbers in zip(self._groups, self._first, wanted, strict=True):
            for key in group.keys() - self._others - first.keys():
                del group[key]
            group.update(deepcopy(first))
            given = {key.removeprefix(MARK): value for key, value in numbers.items()}
            if not leaves_kernel_open(first):
                given.pop("fused", None)
            group.update(given)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return type(one) is type(other) and bool(one == other)
