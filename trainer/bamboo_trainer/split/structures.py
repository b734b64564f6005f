"""Values that a model passes to a block and gets from it: tensors in tuples, lists, dictionaries and dataclasses.

Each is taken apart into its tensors and a form, from which it can be put together again. A boundary between workers
then carries only the tensors, as every worker knows the form.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_trainer.tasks.task_errors import TaskError

CONSTANTS: Final = (
    *(type(None), bool, int, float, complex, str, bytes, slice),
    *(torch.Size, torch.dtype, torch.device, torch.layout, Enum, type),
)
_TENSOR: Final = "a tensor"


class CannotSplit(TaskError):
    """The model cannot be split into layers; the text is a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value, without its tensors."""

    kind: Any  # the value's type, or `_TENSOR`
    parts: tuple["Form", ...] = ()
    keys: tuple[Any, ...] = ()  # of a mapping or a dataclass
    value: Any = None  # a constant

    @property
    def sizes(self) -> bool:
        """Whether it has a whole number, which may be a size of the inputs."""
        return self.kind in (int, torch.Size) or any(part.sizes for part in self.parts)


def take_apart(value: Any, what: str) -> tuple[list[Tensor], Form]:
    """Return a value's tensors and its form. Raises CannotSplit, naming `what`, for any other type."""
    tensors: list[Tensor] = []

    def form(item: Any) -> Form:
        kind = type(item)
        if isinstance(item, Tensor):
            tensors.append(item)
            return Form(_TENSOR)
        if isinstance(item, CONSTANTS):
            return Form(kind, value=item)
        if is_dataclass(item):
            names = tuple(f.name for f in fields(item) if f.init)
            return Form(kind, tuple(form(getattr(item, name)) for name in names), names)
        if isinstance(item, Mapping):
            return Form(kind, tuple(map(form, item.values())), tuple(item))
        if isinstance(item, tuple | list):
            return Form(kind, tuple(map(form, item)))
        raise CannotSplit(
            f"{what} has a value of type {kind.__name__}, which cannot go from worker to worker; expected tensors, "
            "numbers, strings and None, in tuples, lists, dictionaries or dataclasses"
        )

    shape = form(value)
    return tensors, shape


def put_together(form: Form, tensors: Sequence[Tensor]) -> Any:
    """Undo `take_apart`."""
    given = iter(tensors)
    value = _built(form, given)
    assert next(given, None) is None
    return value


def _built(form: Form, given: Iterator[Tensor]) -> Any:
    if form.kind == _TENSOR:
        return next(given)
    if issubclass(form.kind, CONSTANTS):
        return form.value
    parts = [_built(part, given) for part in form.parts]
    make: Callable[..., Any] = form.kind
    if is_dataclass(form.kind):
        return make(**dict(zip(form.keys, parts, strict=True)))
    if issubclass(form.kind, Mapping):
        return make(dict(zip(form.keys, parts, strict=True)))
    return make(*parts) if hasattr(form.kind, "_fields") else make(parts)
