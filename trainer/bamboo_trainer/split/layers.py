"""The layers of a split model: each runs one position, which is a part of the model's forward (see `recording`).

The layer of a position that is only a block calls the block. If the position has code of the model's own, the layer
runs the model's forward from its beginning: on fake tensors before the position, which takes no memory and a few
milliseconds, and on real tensors within it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from bamboo_trainer.split.recording import (
    RESULTS,
    BlockCall,
    CannotSplit,
    Key,
    Recording,
    Shape,
    around,
    called,
    name_of,
    numbered,
    put_together,
    take_apart,
    tensors_in,
)
from bamboo_trainer.task import Parts


class Alongside(Protocol):
    """Tensors that layers pass on in addition to the model's own, such as a sum over the blocks.

    begin: returns their initial values for the model's inputs. watched: returns the modules of a block whose outputs
    `after` needs. end: uses their final values, such as in a loss.
    """

    size: int  # the number of tensors

    def begin(self, inputs: Parts) -> Parts: ...

    def watched(self, block: nn.Module) -> list[nn.Module]: ...

    def after(self, seen: list[tuple[nn.Module, object]], parts: Parts) -> Parts:
        """Return the updated tensors after a layer. seen: the watched modules of the layer's block with their outputs,
        in the order of calls; empty without a block. parts: the tensors before the layer.
        """

    def end(self, parts: Parts) -> None: ...


@contextmanager
def outputs_of(watched: list[nn.Module]) -> Iterator[list[tuple[nn.Module, object]]]:
    """Yield a list that collects the outputs of watched modules while a block runs inside this context."""
    outputs: list[tuple[nn.Module, object]] = []

    def collect(module: nn.Module, _: object, returned: object) -> None:
        outputs.append((module, returned))

    hooks = [module.register_forward_hook(collect) for module in watched]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


Shapes = tuple[tuple[Shape, torch.dtype], ...]
Recordings = Callable[[Shapes], Recording]
Call = Callable[[nn.Module, Sequence[Tensor]], Any]


class Route:
    """The recorded forward of a model, which all layers of the split model share.

    base: the recording with the example inputs. at: returns the recording for inputs of other shapes. mode: the mode of
    the fake tensors. blocks: names of the blocks, in the order of their calls. call: runs the model's forward.
    alongside: tensors passed in addition to the model's own, if any.
    """

    def __init__(
        self, base: Recording, at: Recordings, mode: FakeTensorMode, blocks: Sequence[str], call: Call
    ) -> None:
        self.base, self.mode, self.blocks, self.call = base, mode, blocks, call
        self.alongside: Alongside | None = None
        self._at = at
        count = len(blocks)
        own = base.own_code
        self.positions = tuple(p for p in range(count + 2) if p in own or 0 < p <= count)
        self._shaped = own - {0} if not base.by_shape else frozenset(range(count + 2))

    def carried(self, position: int) -> bool:
        """Return whether this position passes on the shapes of the model's inputs, for later positions."""
        return any(p > position for p in self._shaped)

    def recording(self, shapes: Shapes | None) -> Recording:
        if shapes is None or not self.base.by_shape:
            return self.base
        found = self._at(shapes)
        routes = [(one.boundaries, one.own_code, one.result_keys) for one in (found, self.base)]
        if routes[0] != routes[1]:
            raise CannotSplit(
                f"what the model's blocks pass on is another for inputs of shapes {[s for s, _ in shapes]}"
            )
        return found


class SplitLayer(nn.Module):
    """A layer that runs one position of a model's forward. It gets and returns the tensors that the recording lists for
    the position's boundaries; the first position gets the model's inputs, the last one returns the model's result.

    Empty tensors [0, *shape] follow if a later position needs the inputs' shapes; the tensors of `alongside` are last.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, position: int, route: Route) -> None:
        super().__init__()
        self.module, self._position, self._route = module, position, route

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitLayer":
        """Return a copy that shares the route, and the fake tensors that stand in for other layers' parameters."""
        memo[id(self._route)] = self._route
        for module in self.modules():
            memo |= {id(value): value for value in vars(module).values() if isinstance(value, FakeTensor)}
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    @property
    def has_own_code(self) -> bool:
        """Whether the position runs code of the model's forward, and not only a block."""
        return self._position in self._route.base.own_code

    def extra_repr(self) -> str:
        blocks = self._route.blocks
        if 0 < self._position <= len(blocks):
            return blocks[self._position - 1]
        return f"before {blocks[0]}" if self._position == 0 else f"after {blocks[-1]}"

    def forward(self, *parts: Tensor) -> Tensor | Parts:
        beside = self._route.alongside
        if beside is None:
            return self._own(parts)
        first, last = (self._position == self._route.positions[end] for end in (0, -1))
        given, along = (parts, beside.begin(parts)) if first else (parts[: -beside.size], parts[-beside.size :])
        block = self._block()
        with outputs_of(beside.watched(block) if block else []) as seen:
            result = self._own(given)
        along = beside.after(seen, along)
        if last:
            beside.end(along)
        return result if last else (*result, *along)

    def _block(self) -> nn.Module | None:
        blocks = self._route.blocks
        return self.module.get_submodule(blocks[self._position - 1]) if 0 < self._position <= len(blocks) else None

    def _own(self, parts: Parts) -> Parts:
        """Run this position; return the tensors that it passes on or, in the last position, the model's result."""
        route, position = self._route, self._position
        first = position == route.positions[0]
        values, shapes = self._unpacked(parts, first)
        recording = route.recording(shapes)
        for at, key in recording.written:
            if at == position and key in values:
                values[key] = values[key].clone()
        count = len(route.blocks)
        if position in recording.own_code:
            run = ModelRun(self, recording, values, shapes or ())
            result = run.to_its_end()
        else:
            call, result = recording.calls[position - 1], None
            args, kwargs = call.arguments(values)
            with around(route.base.calls[position - 1].settings):
                returned = self.module.get_submodule(call.name)(*args, **kwargs)
            call.keep(returned, values)
        if position == route.positions[-1]:
            leaves = result if result is not None else [values[key] for key in recording.result_keys]
            return tuple(leaves)
        kept = tuple(self._passed(recording, key, values[key]) for key in recording.boundaries[min(position, count)])
        if not route.carried(position):
            return kept
        device = kept[0].device if kept else None
        return (*kept, *(torch.empty((0, *shape), dtype=dtype, device=device) for shape, dtype in shapes or ()))

    def _unpacked(self, parts: Parts, first: bool) -> tuple[dict[Key, Tensor], Shapes | None]:
        if first:
            return {("input", 0, n): t for n, t in enumerate(parts)}, tuple((tuple(t.shape), t.dtype) for t in parts)
        base, positions = self._route.base, self._route.positions
        keys = base.boundaries[positions[positions.index(self._position) - 1]]
        values = {}
        for key, part in zip(keys, parts[: len(keys)], strict=True):
            arrived = part if key in base.gradients else part.detach()
            values[key] = torch.view_as_complex(arrived) if key in base.complex else arrived
        carriers = parts[len(keys) :]
        return values, tuple((tuple(t.shape[1:]), t.dtype) for t in carriers) if carriers else None

    @staticmethod
    def _passed(recording: Recording, key: Key, value: Tensor) -> Tensor:
        """Return a value as a layer passes it on: detached unless it needs a gradient, complex numbers as pairs of real
        ones, and contiguous, since the bits of a matrix product may depend on the memory layout.
        """
        passed = value if key in recording.gradients else value.detach()
        return (torch.view_as_real(passed.resolve_conj()) if key in recording.complex else passed).contiguous()


@contextmanager
def _seated(model: nn.Module, names: Sequence[str], instead: Callable[..., Any]) -> Iterator[None]:
    """Replace blocks' forwards in this context by `instead`, whose first argument is the block's own forward."""
    blocks = dict.fromkeys(model.get_submodule(name) for name in names)
    own = {block: block.__dict__.get("forward") for block in blocks}
    for block in blocks:
        block.__dict__["forward"] = partial(instead, block.forward)
    try:
        yield
    finally:
        for block, forward in own.items():
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward


class _Enough(BaseException):
    """Signal that stops the model's forward at the position's end. No `except Exception` in the model catches it."""


class ModelRun(TorchFunctionMode):
    """A run of the model's forward up to the end of a position: on fake tensors before it, on real ones within it.

    values: real tensors by key; the run adds the tensors that it makes for later positions.
    """

    def __init__(self, layer: SplitLayer, recording: Recording, values: dict[Key, Tensor], shapes: Shapes) -> None:
        super().__init__()
        self._layer, self._recording, self._values, self._shapes = layer, recording, values, shapes
        self._route, self._position = layer._route, layer._position
        self._begin = self._position - 1  # the block whose call, or return, begins the part with data
        self._blocks = len(self._route.blocks)
        self._next, self._now, self._count = 0, 0, 0
        self._real, self._paused = self._position == 0, False
        self._stack = ExitStack()
        self._imagined: dict[int, tuple[Key, Tensor]] = {}
        self._later = {key for b in recording.boundaries[: self._blocks + 1] for key in b}

    def to_its_end(self) -> list[Tensor] | None:
        """Run up to the position's end. Return the tensors of the model's result in the last position, else None.

        Raises CannotSplit if the forward differs from the recording.
        """
        model = self._layer.module
        try:
            with _seated(model, self._route.blocks, self._block), self._stack, self:
                result = self._route.call(model, self._inputs())
        except _Enough:
            return None
        tensors, form = take_apart(result, "what the model returns")
        if form != self._recording.result:
            raise CannotSplit(
                "the model returned something else than when it was split: what it returns depends on values"
            )
        return [self._in_reality(t) for t in tensors]

    def _inputs(self) -> list[Tensor]:
        if self._real:
            return [self._values["input", 0, n] for n in range(len(self._shapes))]
        self._stack.enter_context(self._gradients_aside())
        self._stack.enter_context(_disable_current_modes())
        # saved-tensor hooks of other code would need values
        self._stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        self._stack.enter_context(self._route.mode)
        self._paused = True
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes]
        self._paused = False
        for n, tensor in enumerate(inputs):
            self._imagine(tensor, ("input", 0, n))
        return inputs

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Remove, in this context, gradients whose dtype differs from their parameter's: torch cannot make a fake
        tensor of a parameter with such a gradient.
        """
        self._paused = True
        aside = [(p, p.grad) for p in self._layer.module.parameters() if p.grad is not None and p.grad.dtype != p.dtype]
        for parameter, _ in aside:
            parameter.grad = None
        self._paused = False
        try:
            yield
        finally:
            self._paused = True
            for parameter, gradient in aside:
                parameter.grad = gradient
            self._paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if self._real and any(id(t) in self._imagined for t in given):
            args, kwargs = tree_map(lambda t: self._in_reality(t) if isinstance(t, Tensor) else t, (args, kwargs))
            given = tensors_in((args, kwargs))
        result, made, written = called(func, args, kwargs, given)
        if not made and not written:
            return result
        self._count += 1
        for n, tensor in numbered(made, written):
            self._made(("made", self._now, RESULTS * self._count + n), tensor, func)
        return result

    def _made(self, key: Key, tensor: Tensor, function: Any) -> None:
        if key not in self._later or key not in self._recording.made:
            return
        if name_of(function) != self._recording.made[key]:
            raise CannotSplit(
                f"the model's forward called {name_of(function)} where it called {self._recording.made[key]} when it "
                "was split: its way depends on values or on earlier calls"
            )
        if self._real:
            self._values[key] = tensor
        else:
            self._imagine(tensor, key)

    def _block(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace a block's forward: skip it before the position, begin the position, or raise _Enough at its end."""
        i, self._next = self._next, self._next + 1
        call = self._recording.calls[i]
        given, form = take_apart((args, kwargs), f"{call.name} gets something that")
        if form != call.form and self._real:
            raise CannotSplit(
                f"{call.name} is called with something else than when the model was split: it depends on values"
            )
        if self._real:  # the position ends here
            for key, tensor in zip(call.keys, given, strict=True):
                if key not in self._values:
                    self._values[key] = self._in_reality(tensor)
            raise _Enough
        for key, tensor in zip(call.keys, given, strict=True):
            self._imagine(tensor, key)
        self._now, self._count = (i + 1 if i + 1 < self._blocks else i + 2), 0
        if i == min(self._begin, self._blocks - 1):
            return self._begins(call, forward)
        self._paused = True
        outs = [torch.empty_like(given[s]) if isinstance(s, int) else torch.empty(s) for s in call.out_shapes]
        self._paused = False
        for key, tensor in zip(call.out_keys, outs, strict=True):
            self._imagine(tensor, key)
        return put_together(call.out, outs)

    def _begins(self, call: BlockCall, forward: Any) -> Any:
        """Begin the position at this block: switch the run to real tensors, and return the block's result."""
        self._stack.close()
        self._real = True
        if self._position <= self._blocks:  # the block belongs to the position
            args, kwargs = call.arguments(self._values)
            self._paused = True
            result = forward(*args, **kwargs)
            self._paused = False
            call.keep(result, self._values)
            return result
        return put_together(call.out, [self._values[key] for key in call.out_keys])

    def _imagine(self, tensor: Tensor, key: Key) -> None:
        self._imagined[id(tensor)] = key, tensor

    def _in_reality(self, tensor: Tensor) -> Tensor:
        known = self._imagined.get(id(tensor))
        if known is None or known[0] not in self._values:
            return tensor
        return self._values[known[0]]
