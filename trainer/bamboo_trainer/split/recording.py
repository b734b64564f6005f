"""The recording of the tensors that pass between a model's blocks, made by running its forward once on fake tensors.

A position is a part of the forward that one layer runs. Of n blocks, position 0 is the model's code before the first
block, i + 1 is block i with the code between it and the next block, and n + 1 is the code after the last block.

A model passes to a block, and gets from it, tensors in tuples, lists, dictionaries and dataclasses. `take_apart`
separates each value into its tensors and a `Form`, from which `put_together` rebuilds it. A boundary between workers
then carries only the tensors, as every worker knows the form.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from bamboo_trainer.split.first_values import NEEDS_VALUES
from bamboo_trainer.tasks.task_errors import TaskError, describe, where

CONSTANTS: Final = (
    *(type(None), bool, int, float, complex, str, bytes, slice),
    *(torch.Size, torch.dtype, torch.device, torch.layout, Enum, type),
)
_TENSOR: Final = "a tensor"


class CannotSplit(TaskError):
    """Error because a model cannot be split into layers; the text is one sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value: its types and constants, without its tensors."""

    kind: Any  # the value's type, or `_TENSOR`
    parts: tuple["Form", ...] = ()
    keys: tuple[Any, ...] = ()  # of a mapping or a dataclass
    value: Any = None  # a constant

    @property
    def sizes(self) -> bool:
        """Whether the form contains an integer or a torch.Size, which may depend on the shapes of the inputs."""
        return self.kind in (int, torch.Size) or any(part.sizes for part in self.parts)


def take_apart(value: Any, what: str) -> tuple[list[Tensor], Form]:
    """Split a value into its tensors and its form. what: names the value at the beginning of an error's text.

    Raises CannotSplit for a type other than tensors, `CONSTANTS`, mappings, tuples, lists and dataclasses.
    """
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
    """Rebuild a value from its form and its tensors, as `take_apart` returned them."""
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


_DEVICE_TYPES: Final = ("cpu", "cuda")
_ATTENTION: Final[tuple[Callable[[], bool], ...]] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The autocast and the gradient mode that the model's forward sets around a block's call."""

    # device type, whether autocast is on for it, and its dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    gradients: bool | None = None  # None: as around the model's call


@dataclass(frozen=True, slots=True)
class Surroundings:
    """torch's settings in this thread that a block's result may depend on."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    nesting: int  # of autocast
    gradients: bool
    others: tuple[tuple[str, Any], ...]  # settings that a layer cannot restore, with their names


def surroundings() -> Surroundings:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return Surroundings(
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES),
        nesting,
        torch.is_grad_enabled(),
        (
            ("torch.inference_mode", torch.is_inference_mode_enabled()),
            ("torch.set_default_dtype", torch.get_default_dtype()),
            ("torch.nn.attention.sdpa_kernel", tuple(enabled() for enabled in _ATTENTION)),
        ),
    )


def settings_of(name: str, outside: Surroundings, inside: Surroundings) -> CallSettings:
    """Return the settings to restore around block `name`'s call. outside: around the model's forward; inside: the call.

    Raises CannotSplit if a setting differs that a layer cannot restore.
    """
    for (what, before), (_, now) in zip(outside.others, inside.others, strict=True):
        if before != now:
            raise CannotSplit(f"the model's forward calls {name} with {what} around it: use it within the block")
    differing = tuple(now for before, now in zip(outside.autocast, inside.autocast, strict=True) if before != now)
    if not differing and inside.nesting > outside.nesting:
        differing = inside.autocast  # such as enabled=False, which matters where the job's precision turns it on
    return CallSettings(differing, None if inside.gradients == outside.gradients else inside.gradients)


@contextmanager
def around(settings: CallSettings) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, enabled, dtype in settings.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        if settings.gradients is not None:
            stack.enter_context(torch.set_grad_enabled(settings.gradients))
        yield


logger = logging.getLogger(__name__)

Key = tuple[str, int, int]
"""A tensor of the forward: ("input", 0, n), the model's n-th input; ("call", i, n) or ("out", i, n), the n-th tensor
that block i gets or returns; ("made", position, RESULTS * f + n), the n-th result of the position's f-th call."""

Shape = tuple[int, ...]
_LOST: Final[Key] = ("lost", 0, 0)
_UNKNOWN: Final[Key] = ("unknown", 0, 0)
RESULTS: Final = 256  # most results of a function, in a key's number


def born(key: Key) -> int:
    """Return the number of the position that creates the tensor of a key; -1 for an input of the model."""
    kind, number, _ = key
    return -1 if kind == "input" else number + (kind == "out")


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The recorded call of a block.

    number: its place among the blocks, from 0. settings: torch's settings around the call. form, keys: the form of its
    arguments and the keys of their tensors. out, out_keys: the same for its result. out_shapes: the shapes of the
    result's tensors, each as the number of an argument's tensor with the same shape and dtype, or as sizes.
    """

    number: int
    name: str
    settings: CallSettings
    form: Form
    keys: tuple[Key, ...]
    out: Form
    out_keys: tuple[Key, ...]
    out_shapes: tuple[int | Shape, ...]

    def arguments(self, values: Mapping[Key, Tensor]) -> Any:
        """Return the block's arguments, (args, kwargs), with the tensors from `values`."""
        return put_together(self.form, [values[key] for key in self.keys])

    def keep(self, result: Any, values: dict[Key, Tensor]) -> None:
        """Add the tensors of the block's result to `values`. Raises CannotSplit for another form than recorded."""
        tensors, form = take_apart(result, f"{self.name} returns something that")
        if form != self.out:
            raise CannotSplit(
                f"{self.name} returned something else than when the model was split: what it returns depends on values"
            )
        for key, tensor in zip(self.out_keys, tensors, strict=True):
            values.setdefault(key, tensor)
            if key[:2] == ("out", self.number):
                values[key] = tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A model's recorded forward, from which each layer runs its position. calls: the calls of the model's blocks."""

    calls: tuple[BlockCall, ...]
    # result, result_keys: the form and the tensors of the model's result
    result: Form
    result_keys: tuple[Key, ...]
    boundaries: tuple[tuple[Key, ...], ...]  # by position, the tensors that later positions need, in order
    own_code: frozenset[int]  # positions that run code of the model's forward, and not only a block
    gradients: frozenset[Key]  # tensors that require a gradient
    complex: frozenset[Key]  # complex tensors, which cross as pairs of real ones
    written: frozenset[tuple[int, Key]]  # tensors of earlier positions that a position writes to
    made: Mapping[Key, str]  # by tensor ("made", ...): the name of the function that made it
    used: Mapping[int, frozenset[int]]  # by position, ids of parameters and buffers that its own code uses

    @property
    def by_shape(self) -> bool:
        """Whether the recording holds only for inputs of the recorded shapes."""
        exact = any(isinstance(shape, tuple) for call in self.calls for shape in call.out_shapes)
        return exact or any(call.form.sizes or call.out.sizes for call in self.calls)


Really = Callable[[int, Form, Sequence[Tensor]], Any]


def record(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    names: Sequence[str],
    inputs: Sequence[Tensor],
    call: Any,
    really: Really,
) -> Recording:
    """Record a model's forward. blocks: modules of the model, in the order of their calls. names: the blocks' names.
    call: (model, inputs) -> the model's result. really: (block's number, form of its arguments, their tensors) -> its
    result as fake tensors; called for a block that fails on fake tensors, to run it on real ones.

    Replaces the forwards of the blocks, and does not restore them. Raises CannotSplit.
    """
    recorder = _Recorder(model, blocks, names, inputs, really)
    try:
        with recorder:
            result = call(model, inputs)
    except Exception as error:
        if recorder.problem is None and not isinstance(error, CannotSplit):
            if isinstance(error, NEEDS_VALUES):
                what = "its forward goes another way depending on values"
                raise CannotSplit(f"the model cannot be split: {what} ({where(error)})") from error
            raise CannotSplit(
                f"the model cannot be split, as its forward on tensors without data raised {describe(error)}"
            ) from error
        recorder.problem = recorder.problem or error
    if recorder.problem is not None:
        raise recorder.problem
    return recorder.finished(result)


class _Recorder(TorchFunctionMode):
    """Recorder of the torch functions that a model calls outside of its blocks, and of its blocks' calls."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        names: Sequence[str],
        inputs: Sequence[Tensor],
        really: Really,
    ) -> None:
        super().__init__()
        self._really = really
        self.problem: Exception | None = None
        self._blocks, self._names = blocks, names
        self._position, self._next, self._count = 0, 0, 0
        self._body: frozenset[int] | None = None  # ids of tensors that the running block may use
        self._owned = {id(t): name for name, t in _all_tensors(model)}
        self._block_owned = [frozenset(id(t) for _, t in _all_tensors(block)) for block in blocks]
        self._keys: dict[int, tuple[Key, Tensor]] = {}
        self._last_use: dict[Key, int] = {}
        self._order: list[Key] = []
        self._gradients: set[Key] = set()
        self._complex: set[Key] = set()
        self._written: set[tuple[int, Key]] = set()
        self._made: dict[Key, str] = {}
        self._used: dict[int, set[int]] = {}
        self._calls: list[BlockCall] = []
        self._outside = surroundings()
        self._lost: dict[int, str] = {}  # by id of a tensor that must not be used any more: why
        self._changing: set[int] = set()  # positions that write to memory which tensors share
        self._ran: set[int] = set()
        for n, tensor in enumerate(inputs):
            self._know(tensor, ("input", 0, n))
        for block in dict.fromkeys(blocks):
            block.__dict__["forward"] = partial(self._block, block, block.forward)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        result, made, written = called(func, args, kwargs, given)
        if not made and not written:
            return result  # it only read metadata, such as a shape
        if self._body is not None:
            self._within_block(given)
            return result
        self._ran.add(self._position)
        for tensor in given:
            self._use(tensor)
        self._count += 1
        for tensor in written:
            self._written_to(tensor)
        name = name_of(func)
        for n, tensor in numbered(made, written):
            if id(tensor) not in self._owned and (id(tensor) not in self._keys or any(tensor is w for w in written)):
                key = ("made", self._position, RESULTS * self._count + n)
                self._made[key] = name
                self._know(tensor, key)
        return result

    def finished(self, result: Any) -> Recording:
        """Return the recording. result: the result of the model's forward. Raises CannotSplit."""
        count = len(self._blocks)
        if self._next < count:
            raise CannotSplit(f"{self._names[self._next]} is not called by the model's forward, or out of order")
        self._position = count + 1
        tensors, form = take_apart(result, "what the model returns")
        if not tensors:
            raise CannotSplit("the model returns no tensor")
        keys = tuple(self._use(tensor) or _UNKNOWN for tensor in tensors)
        for key in self._calls[-1].out_keys:  # the code after the last block gets all that it returns
            self._last_use[key] = count + 1
        boundaries = tuple(
            tuple(k for k in self._order if born(k) <= p < self._last_use.get(k, -1)) for p in range(count + 1)
        )
        own = {p for p in range(count) if any(born(k) == p and k[0] != "out" for k in boundaries[p])}
        if any(key == _UNKNOWN or born(key) > count for key in keys):
            own.add(count + 1)
        own |= self._changing
        return Recording(
            calls=tuple(self._calls),
            result=form,
            result_keys=keys,
            boundaries=boundaries,
            own_code=frozenset(own | (self._ran & {0, count + 1})),
            gradients=frozenset(self._gradients),
            complex=frozenset(self._complex),
            written=frozenset(self._written),
            made=self._made,
            used={position: frozenset(ids) for position, ids in self._used.items()},
        )

    def _block(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the call of a block, and run its own forward. Called in place of the block's `forward`."""
        if self._body is not None:
            return forward(*args, **kwargs)
        i = self._next
        if i == len(self._blocks) or self._blocks[i] is not block:
            expected = f"after {self._names[i - 1]}" if i == len(self._blocks) else f"before {self._names[i]}"
            raise self._refuse(
                f"{self._names[list(self._blocks).index(block)]} is called {expected}: the blocks have to be called in "
                "their order, each once"
            )
        name, self._next = self._names[i], i + 1
        try:
            settings = settings_of(name, self._outside, surroundings())
        except CannotSplit as error:
            raise self._refuse(str(error)) from None
        given, form = take_apart((args, kwargs), f"{name} gets something that")
        for n, tensor in enumerate(given):
            key = self._key(tensor)
            if key == _UNKNOWN or (key[0] == "made" and born(key) == i):
                self._know(tensor, ("call", i, n))
        self._position = i + 1
        keys = tuple(self._use(tensor) or self._unkept(name) for tensor in given)
        versions = [t._version for t in given]
        self._body = frozenset(map(id, given)) | self._block_owned[i]
        try:
            result = forward(*args, **kwargs)
        except Exception as error:
            if isinstance(error, CannotSplit):
                raise
            logger.info("%s is run with values, since without it raised %s", name, describe(error))
            result = self._really(i, form, given)
        self._body = None
        self._count = 0
        written = [t._version != v for t, v in zip(given, versions, strict=True)]
        out, out_keys, shapes = self._returned(i, name, result, given, written)
        self._calls.append(BlockCall(i, name, settings, form, keys, out, out_keys, shapes))
        self._position = i + 1 if i + 1 < len(self._blocks) else i + 2
        return result

    def _returned(
        self, i: int, name: str, result: Any, given: Sequence[Tensor], written: Sequence[bool]
    ) -> tuple[Form, tuple[Key, ...], tuple[int | Shape, ...]]:
        """Return the form of a block's result, its tensors' keys, and their shapes as in `BlockCall`. Also give keys to
        new tensors, and mark arguments that the block has written to (`written`). given: the arguments' tensors.
        """
        for tensor, changed in zip(given, written, strict=True):
            if changed:
                self._written.add((i + 1, self._key(tensor)))
                for lost in (tensor, *self._sharing(tensor)):
                    self._lose(lost, f"{name} or an earlier block writes to a tensor that is used later")
        made, form = take_apart(result, f"{name} returns something that")
        for n, tensor in enumerate(made):
            if self._key(tensor) in (_UNKNOWN, _LOST):
                self._know(tensor, ("out", i, n))
        shapes = tuple(
            next((m for m, g in enumerate(given) if (g.shape, g.dtype) == (t.shape, t.dtype)), tuple(t.shape))
            for t in made
        )
        return form, tuple(self._key(t) for t in made), shapes

    def _within_block(self, given: Iterable[Tensor]) -> None:
        assert self._body is not None
        for tensor in given:
            if id(tensor) in self._body:
                continue
            name = self._names[self._next - 1]
            if id(tensor) in self._owned:
                raise self._refuse(
                    f"{name} uses {self._owned[id(tensor)]}, which it does not have: let it have it as an attribute"
                )
            if id(tensor) in self._keys and self._keys[id(tensor)][1] is tensor:
                raise self._refuse(f"{name} uses a tensor of the model's that it is not called with: pass it")

    def _key(self, tensor: Tensor) -> Key:
        return self._keys[id(tensor)][0] if id(tensor) in self._keys else _UNKNOWN

    def _know(self, tensor: Tensor, key: Key) -> None:
        self._keys[id(tensor)] = key, tensor  # held, so that the id stays its own
        self._order.append(key)
        if tensor.requires_grad:
            self._gradients.add(key)
        if tensor.is_complex():
            self._complex.add(key)

    def _use(self, tensor: Tensor) -> Key | None:
        """Record that the current position needs the tensor, and return its key; None for a parameter, a buffer or an
        unknown tensor. Raises CannotSplit if the tensor must not be used any more.
        """
        if id(tensor) in self._owned:
            self._used.setdefault(self._position, set()).add(id(tensor))
            return None
        if id(tensor) not in self._keys:
            return None
        key = self._keys[id(tensor)][0]
        if key == _LOST:
            raise self._refuse(self._lost[id(tensor)])
        self._last_use[key] = max(self._position, self._last_use.get(key, -1))
        return key

    def _written_to(self, tensor: Tensor) -> None:
        """Record that the model writes to a tensor outside its blocks. A position has separate copies of tensors from
        earlier positions, so a write would not reach tensors that share memory in the model: `_lose` forbids their use.
        """
        sharing = self._sharing(tensor)
        if sharing:
            self._changing.add(self._position)
        known = [tensor, *sharing] if self._key(tensor) not in (_UNKNOWN, _LOST) else sharing
        earlier = [t for t in known if born(self._key(t)) < self._position]
        self._written |= {(self._position, self._key(t)) for t in earlier}
        place = f"after {self._names[self._next - 1]}" if self._next else f"before {self._names[0]}"
        for lost in earlier if len(earlier) > 1 else ():
            self._lose(
                lost,
                f"{place} the model's forward writes to a tensor that shares its memory with another one, both made "
                "earlier: write to a copy (.clone())",
            )

    def _sharing(self, tensor: Tensor) -> list[Tensor]:
        """Return the other recorded tensors that share this tensor's memory."""
        storage = tensor.untyped_storage()._cdata
        known = [t for key, t in self._keys.values() if key not in (_UNKNOWN, _LOST)]
        return [t for t in known if t is not tensor and t.untyped_storage()._cdata == storage]

    def _lose(self, tensor: Tensor, why: str) -> None:
        self._keys[id(tensor)] = _LOST, tensor
        self._lost[id(tensor)] = why

    def _unkept(self, name: str) -> Key:
        raise self._refuse(
            f"{name} is called with a parameter or buffer of the model's: let it have it as an attribute"
        )

    def _refuse(self, sentence: str) -> CannotSplit:
        self.problem = self.problem or CannotSplit(sentence)
        return CannotSplit(sentence)


def _all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return list(named)


def name_of(function: Any) -> str:
    return resolve_name(function) or repr(function)


def tensors_in(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def called(
    function: Callable[..., Any], args: Any, kwargs: Any, given: Sequence[Tensor]
) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Call a function. Return its result, the tensors in the result, and the tensors of `given` that it has changed."""
    versions = [t._version for t in given]
    result = function(*args, **kwargs)
    return result, tensors_in(result), [t for t, old in zip(given, versions, strict=True) if t._version != old]


def numbered(made: Sequence[Tensor], written: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the tensors that a function wrote to, then the others that it has made, each once, numbered from 0."""
    return list(enumerate([*written, *(t for t in made if not any(t is w for w in written))]))


def shapes_of(tensors: Sequence[Tensor]) -> tuple[tuple[Shape, torch.dtype], ...]:
    return tuple((tuple(t.shape), t.dtype) for t in tensors)
