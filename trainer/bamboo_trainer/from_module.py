"""Construction of a task from a plain torch.nn.Module: `from_module`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from bamboo_trainer.schedules import constant
from bamboo_trainer.split.first_values import FirstValues, without_values
from bamboo_trainer.split.layers import Alongside, Call, Route, Shapes, SplitLayer
from bamboo_trainer.split.recording import CannotSplit, Form, Recording, put_together, record, shapes_of, take_apart
from bamboo_trainer.task import Dataset, Evaluation, Parts, Task
from bamboo_trainer.tasks.inspection import failing_quietly, values_wanted
from bamboo_trainer.tasks.task_errors import TaskError, describe
from bamboo_trainer.tasks.user_code import check_dataset, length_of

Read = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function from tensors without values, by name, to values for some of them, such as pretrained weights."""

MOST_NAMED: Final = 8  # names of modules in a message
MOST_SHAPES: Final = 256  # of inputs whose recordings are kept
_Slot = tuple[str, str]  # a module's name, and its parameter's or buffer's name


class SplitModule:
    """A torch.nn.Module split into layers at its blocks; its parameters have no values (fake tensors).

    blocks: the names of its blocks, in the order of their calls. layers: factories, as a Task has them. tied: for each
    trainable parameter that several layers have, its names.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        blocks: str | Sequence[str] | None,
        example: Parts,
        call: Call | None = None,
        read: Read | None = None,
        alongside: Callable[[nn.Module], Alongside | None] | None = None,
    ) -> None:
        """Split the module that `make` builds. Raises CannotSplit, or a TaskError that `make` raised.

        blocks: name of a ModuleList, ModuleDict or Sequential, or names of several that are called one after the other;
        None: the module is a Sequential of blocks, or has only one ModuleList. example: inputs of a few samples, for
        their shapes. call: (model, inputs) -> the model's result; None: the inputs are its arguments. read: returns
        initial values. alongside: returns what layers pass on in addition to the model's tensors, or None.
        """
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._call, self._read = call or (lambda model, inputs: model(*inputs)), read
        self._model, self._values = self._built(make)
        self.blocks = tuple(_block_names(self._model, blocks))
        self._recordings: dict[Shapes, Recording] = {}
        self._outs: dict[tuple[type, str, Shapes], tuple[Shapes, Form]] = {}
        base = self._recorded(shapes_of(example))
        self.route = Route(base, self._recorded, self._mode, self.blocks, self._call)
        self.route.alongside = alongside(self._model) if alongside else None
        self._slots = list(_slots(self._model))
        self._hidden = self._without_parameters()
        self._places = self._owners(base)
        self.layers = tuple(partial(self._layer, position) for position in self.route.positions)
        self.tied = tuple(self._ties())

    @property
    def forms(self) -> dict[str, Tensor]:
        """The parameters and buffers by their names, without values; a tensor with several names is one object."""
        return {_joined(slot): self._tensor(slot) for slot in self._slots}

    # recording

    def _built(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, FirstValues]:
        try:
            with without_values(self._mode) as values:
                model = make()
                if isinstance(model, nn.Module) and not model.training:
                    model.train()  # as a training loop does with a model that was loaded in eval mode
        except TaskError:  # `make` has checked the model, and found a mistake
            raise
        except Exception as error:
            raise CannotSplit(f"the model cannot be built without data: {describe(error)}") from error
        if not isinstance(model, nn.Module):
            raise CannotSplit(f"what makes the model returned {type(model).__name__}, expected a torch.nn.Module")
        return model, values

    def _copy(self) -> nn.Module:
        plain = _plain_tensors(self._model.modules())
        return deepcopy(self._model, {id(t): t for t in (*_tensors_in(self._model), *plain)})

    def _recorded(self, shapes: Shapes) -> Recording:
        if shapes not in self._recordings:
            model = self._copy()
            with torch.random.fork_rng(devices=[]), _disable_current_modes(), self._mode, failing_quietly():
                inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
                blocks = [model.get_submodule(name) for name in self.blocks]
                recording = record(model, blocks, self.blocks, inputs, self._call, self._really)
            if len(self._recordings) >= MOST_SHAPES:
                self._recordings.pop(next(iter(self._recordings)))
            self._recordings[shapes] = recording
        return self._recordings[shapes]

    def _really(self, number: int, form: Form, given: Sequence[Tensor]) -> Any:
        """Return a block's result as tensors without values. The first time that a block of its class gets arguments of
        this form and these shapes, run it on real inputs: random floats, and ones for other dtypes.
        """
        name = self.blocks[number]
        block = self._model.get_submodule(name)
        asked = type(block), repr(form), shapes_of(given)
        if asked not in self._outs:
            with _disable_current_modes(), torch.enable_grad():
                tensors = _tensors_in(block)
                module = nn.Module()
                self._put_block(module, name, self._real(tensors, [""] * len(tensors), read=False))
                arguments, named = put_together(form, [_some_values(t) for t in given])
                result, returned = take_apart(module.get_submodule(name)(*arguments, **named), f"what {name} returns")
            self._outs[asked] = shapes_of(result), returned
        shapes, returned = self._outs[asked]
        made = [torch.empty(s, dtype=dtype, requires_grad=dtype.is_floating_point) for s, dtype in shapes]
        return put_together(returned, made)

    # the positions' tensors

    def _owners(self, base: Recording) -> dict[int, list[_Slot]]:
        """Return the slots of the tensors at each position (see `split.recording`): a block's tensors, and the tensors
        that code outside of blocks uses. Unused tensors that no block has go to the last position with such code.
        Raises CannotSplit if such code uses a tensor that only a block of another position has.
        """
        places: dict[int, list[_Slot]] = {position: [] for position in self.route.positions}
        own = sorted(base.own_code)
        for slot in self._slots:
            name = _joined(slot)
            if self._in_block(slot[0]):
                places[1 + next(i for i, b in enumerate(self.blocks) if name.startswith(f"{b}."))].append(slot)
                continue
            tensor = self._tensor(slot)
            users = [position for position in own if id(tensor) in base.used.get(position, ())]
            elsewhere = any(self._in_block(other[0]) for other in self._slots if self._tensor(other) is tensor)
            for position in users or ([own[-1]] if own and not elsewhere else []):
                places[position].append(slot)
        for position in own:
            owned = {id(self._tensor(slot)) for slot in places[position]}
            for missing in base.used.get(position, frozenset()) - owned:
                name = next(_joined(slot) for slot in self._slots if id(self._tensor(slot)) == missing)
                raise CannotSplit(f"the model's forward uses {name} outside of its block: let the model have it, too")
        return places

    def _ties(self) -> Iterator[tuple[str, ...]]:
        groups: dict[int, dict[int, str]] = {}
        for layer, position in enumerate(self.route.positions):
            for slot in self._places[position]:
                tensor = self._tensor(slot)
                if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    groups.setdefault(id(tensor), {}).setdefault(layer, f"{layer}.module.{_joined(slot)}")
        yield from (tuple(names.values()) for names in groups.values() if len(names) > 1)

    def _tensor(self, slot: _Slot) -> Tensor:
        tensor: Tensor = getattr(self._model.get_submodule(slot[0]), slot[1])
        return tensor

    # making layers

    def _layer(self, position: int) -> SplitLayer:
        slots = self._places[position]
        own_code = position in self.route.base.own_code
        given = self._real([self._tensor(slot) for slot in slots], [_joined(slot) for slot in slots])
        module = self._with_own_code(position, slots, given) if own_code else nn.Module()
        if 0 < position <= len(self.blocks):
            self._put_block(module, self.blocks[position - 1], given)
        return SplitLayer(module, position, self.route)

    def _real(self, tensors: Sequence[Tensor], names: Sequence[str], read: bool = True) -> dict[int, Tensor]:
        """Return real parameters and buffers, by the ids of the fake ones; uninitialized if no values are wanted."""
        distinct = {id(t): t for t in tensors}
        if not values_wanted():
            made = {i: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for i, t in distinct.items()}
        else:
            read_values = self._read(dict(zip(names, tensors, strict=True))) if self._read and read else {}
            made = {id(t): read_values[name] for t, name in zip(tensors, names, strict=True) if name in read_values}
            left = [t for i, t in distinct.items() if i not in made]
            made |= {id(t): value for t, value in zip(left, self._values.of(left), strict=True)}
        return {i: _like(distinct[i], value) for i, value in made.items()}

    def _put_block(self, module: nn.Module, name: str, given: Mapping[int, Tensor]) -> None:
        """Put a copy of a block into a module, under the block's name. given: its tensors, by ids of the fake ones."""
        block = self._model.get_submodule(name)
        memo: dict[int, Any] = {id(t): given.get(id(t), t) for t in _tensors_in(block)}
        memo |= self._plain(block.modules(), memo)
        parent, _, leaf = name.rpartition(".")
        holder = module
        for part in parent.split(".") if parent else ():
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder._modules[leaf] = deepcopy(block, memo)

    def _with_own_code(self, position: int, slots: Sequence[_Slot], given: Mapping[int, Tensor]) -> nn.Module:
        """Return a copy of the model with the parameters and buffers of these slots only, and none in its blocks."""
        memo: dict[int, Any] = {id(t): t for t in (*_tensors_in(self._model), *_plain_tensors(self._model.modules()))}
        outside = [module for name, module in self._model.named_modules() if not self._in_block(name)]
        memo |= self._plain(outside, given) | dict(given)
        for name in self.blocks:
            memo |= {id(child): child for child in self._hidden.get_submodule(name).children()}
        model = deepcopy(self._hidden, memo)
        for slot in slots:
            if self._in_block(slot[0]):
                continue
            holder = model.get_submodule(slot[0])
            tensor = holder.__dict__.pop(slot[1], None)
            if tensor is None:
                continue  # the module has two names, and this is the second
            (holder._parameters if isinstance(tensor, nn.Parameter) else holder._buffers)[slot[1]] = tensor
        return model

    def _in_block(self, name: str) -> bool:
        """Return whether a module is a block, or is in a block."""
        return any(f"{name}.".startswith(f"{block}.") for block in self.blocks)

    def _plain(self, modules: Iterable[nn.Module], memo: Mapping[int, Any]) -> dict[int, Any]:
        """Return real tensors for modules' fake ones not in `memo`, by id; uninitialized if no values are wanted."""
        plain = {id(t): t for t in _plain_tensors(modules) if id(t) not in memo}
        if not plain:
            return {}
        if not values_wanted():
            return {i: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for i, t in plain.items()}
        return dict(zip(plain, self._values.of(plain.values()), strict=True))

    def _without_parameters(self) -> nn.Module:
        """Return a copy of the model whose parameters and buffers are plain attributes: not trained, moved or saved."""
        model = self._copy()
        for module in model.modules():
            for kept in (module._parameters, module._buffers):
                for name, tensor in list(kept.items()):
                    if tensor is not None:
                        del kept[name]
                        module.__dict__[name] = tensor
        return model


def _some_values(imagined: Tensor) -> Tensor:
    if imagined.is_floating_point():
        return torch.randn(imagined.shape, dtype=imagined.dtype)
    return torch.ones(imagined.shape, dtype=imagined.dtype)


def _like(imagined: Tensor, value: Tensor) -> Tensor:
    """Return the value, as a parameter with the same `requires_grad` if `imagined` is a parameter."""
    if isinstance(imagined, nn.Parameter):
        return nn.Parameter(value, imagined.requires_grad)
    return value


def _joined(slot: _Slot) -> str:
    return f"{slot[0]}.{slot[1]}" if slot[0] else slot[1]


def _slots(model: nn.Module) -> Iterator[_Slot]:
    for name, module in model.named_modules(remove_duplicate=False):
        for kept in (module._parameters, module._buffers):
            yield from ((name, leaf) for leaf, tensor in kept.items() if tensor is not None)


def _tensors_in(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _plain_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors without values in modules' attributes; these include parameters and buffers."""
    for module in modules:
        for value in module.__dict__.values():
            yield from (t for t in _flat(value) if isinstance(t, FakeTensor))


def _flat(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _flat(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _flat(item, depth - 1)


def _block_names(model: nn.Module, blocks: str | Sequence[str] | None) -> Iterator[str]:
    if blocks is None:
        if isinstance(model, nn.Sequential):
            yield from model._modules
            return
        blocks = _only_list(model)
    for name in (blocks,) if isinstance(blocks, str) else blocks:
        try:
            holder = model.get_submodule(name)
        except AttributeError:
            raise CannotSplit(f"blocks: the model has no {name!r}") from None
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential) or not len(holder):
            raise CannotSplit(
                f"blocks: {name!r} is a {type(holder).__name__} of the model, expected a ModuleList, a ModuleDict or a "
                "Sequential that is not empty"
            )
        yield from (f"{name}.{leaf}" if name else leaf for leaf in holder._modules)


def _only_list(model: nn.Module) -> str:
    lists = _outermost(model, nn.ModuleList)
    if len(lists) != 1:
        names = ", ".join(map(repr, lists or _outermost(model, nn.Sequential)[:MOST_NAMED])) or "none"
        raise CannotSplit(f"blocks must name the model's ModuleList or Sequential of blocks; of those it has: {names}")
    return lists[0]


def _outermost(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the names of non-empty modules of a kind that are in no other such module and no parametrization."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, kind) and len(list(module.children())) and "parametrizations" not in name.split(".")
    ]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


EXAMPLE = 2  # samples whose shapes the model is recorded with


def from_module(
    make: Callable[[], nn.Module],
    *,
    loss: Callable[[Any, Parts], Any],
    dataset: Dataset,
    blocks: str | Sequence[str] | None = None,
    inputs: Sequence[str] = (),
    call: Call | None = None,
    read: Read | None = None,
    checkpoint: bool = False,
    **task: Any,
) -> Task:
    """Return the task of a torch.nn.Module, split into layers: each of its blocks becomes a layer.

    make: builds the whole model; it runs on tensors without values. A model in eval mode is put into training mode;
      parts in eval mode of a model in training mode stay in eval mode.
    loss: (outputs, targets) -> scalar, as in `Task`. outputs: what the model returns, but a single tensor comes as a
      tuple. targets: the dataset's, a tuple of tensors.
    blocks: the name of the ModuleList, ModuleDict or Sequential whose modules become layers, or the names of several
      that the forward runs one after the other. Not needed for a Sequential, or if there is only one ModuleList.
    inputs: names of the forward's arguments for the dataset's inputs; by default the first ones. Unused with `call`.
    call: (model, inputs) -> its result, for a model that is not simply called with its inputs.
    read: returns initial values, such as pretrained weights, for one layer at a time: tensors without values by name ->
      the available values by name.
    checkpoint: activation checkpointing: blocks keep only their inputs for the backward.
    task: the other fields of `Task`: optimizer, learning_rate (a function, or a number) and so on. `metrics`, and the
      metrics of `evaluation`, are called with the arguments of the loss.

    Raises TaskError, a ValueError, if the model cannot be split or the dataset is invalid.
    """
    split = SplitModule(
        make, blocks, example_of(dataset), call or (partial(_by_name, tuple(inputs)) if inputs else None), read
    )
    return task_of_split(split, loss=loss, dataset=dataset, checkpoint=checkpoint, **task)


def task_of_split(
    split: SplitModule, *, loss: Callable[[Any, Parts], Any], dataset: Dataset, checkpoint: bool = False, **task: Any
) -> Task:
    """Return the task of a split module. See `from_module`."""
    rate = task.pop("learning_rate", None)
    if isinstance(rate, int | float):
        task["learning_rate"] = constant(float(rate))
    elif rate is not None:
        task["learning_rate"] = rate
    form = split.route.base.result
    blocks = [n for n, position in enumerate(split.route.positions) if 0 < position <= len(split.blocks)]
    if "metrics" in task:
        task["metrics"] = _metrics(task["metrics"], form)
    if isinstance(task.get("evaluation"), Evaluation):
        measured: Evaluation = task["evaluation"]
        task["evaluation"] = replace(measured, metrics=_metrics(measured.metrics, form))
    return Task(
        layers=split.layers,
        loss=partial(_as_returned, loss, form),
        dataset=dataset,
        tied=split.tied,
        checkpointed=blocks if checkpoint else (),
        **task,
    )


def example_of(dataset: Dataset) -> Parts:
    """Return the inputs of EXAMPLE samples of a dataset. Raises TaskError if it has no `batch`, or is empty."""
    check_dataset(dataset)
    length = length_of(dataset)
    with torch.random.fork_rng(devices=[]):
        given, _ = dataset.batch([n % length for n in range(EXAMPLE)])
    return given


def _by_name(names: Sequence[str], model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    return model(**dict(zip(names, inputs, strict=True)))


def _metrics(metrics: Any, form: Form) -> Any:
    """Wrap metrics so that they are called like the loss. Keep invalid ones: the task's checks report them."""
    if not isinstance(metrics, Mapping):
        return metrics
    return {
        name: partial(_as_returned, metric, form) if callable(metric) else metric for name, metric in metrics.items()
    }


def _as_returned(function: Callable[[Any, Parts], Any], form: Form, outputs: Parts, targets: Parts) -> Any:
    """Call a loss or a metric with the model's result, rebuilt in its form; a single tensor becomes a tuple."""
    returned = put_together(form, outputs)
    return function((returned,) if isinstance(returned, Tensor) else returned, targets)
