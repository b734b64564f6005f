"""Counting of floating point operations (FLOPs) in torch, with memory traffic converted into operations.

An operation costs the larger of its computation and its traffic, as in the roofline model. torch's own counter
(`torch.utils.flop_counter`) knows products and convolutions; this module adds what it lacks. Operations that only read
and write (an embedding, an activation, a norm) count by their bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

OPERATIONS_PER_BYTE: Final = 16  # in fp32: about 10 on CPUs, 10 to 20 on GPUs

Shape = tuple[int, ...]
aten = torch.ops.aten


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Return the operations of attention: queries by keys, weights by values. Shapes: [batch, heads, length, size]."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])


def _attention_backward(_: Shape, query: Shape, key: Shape, value: Shape, *__: object, **___: object) -> int:
    """Return the operations of attention's backward: the weights once more, and two products for each forward one."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (3 * size + 2 * value[3])


def _lstm(given: Shape, of_input: Shape, of_hidden: Shape, *_: object, **__: object) -> int:
    """Return the operations of an LSTM layer in one direction. given: [length, batch, size], or batch first."""
    return 2 * given[0] * given[1] * (of_input[0] * of_input[1] + of_hidden[0] * of_hidden[1])


def _lstm_backward(*shapes: Any, **named: Any) -> int:
    return 2 * _lstm(*shapes, **named)


def _vector(matrix: Shape, *_: object, **__: object) -> int:
    return 2 * matrix[0] * (matrix[1] if len(matrix) > 1 else 1)


def _added_vector(_: Shape, matrix: Shape, *__: object, **___: object) -> int:
    return 2 * matrix[0] * matrix[1]


def _bilinear(one: Shape, weight: Shape, *_: object, **__: object) -> int:
    """Return the operations of `torch.bilinear`. one: [batch, 1, in, 1] or similar. weight: [1, out, in, in]."""
    return 2 * one[0] * weight[0] * weight[1] * weight[2] * (weight[3] if len(weight) > 3 else 1)


def _distances(one: Shape, other: Shape, *_: object, **__: object) -> int:
    batch = 1
    for size in one[:-2]:
        batch *= size
    return 3 * batch * one[-2] * other[-2] * one[-1]


UNCOUNTED: Final[Mapping[Any, Callable[..., int]]] = {  # by FlopCounterMode
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _lstm,
    aten.mkldnn_rnn_layer_backward: _lstm_backward,
    aten.mv: _vector,
    aten.dot: _vector,
    aten.vdot: _vector,
    aten.addmv: _added_vector,
    aten._trilinear: _bilinear,
    aten._cdist_forward: _distances,
}

_LOOKUPS: Final = frozenset(  # they read only the returned part of a table
    {aten.embedding, aten.index_select, aten.index, aten.gather, aten.take, aten._unsafe_index, aten._embedding_bag}
)
_ALLOCATIONS: Final = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
)


class _NoModules(nullcontext[None]):
    """An empty replacement of FlopCounterMode's module hooks.

    In torch.no_grad, those hooks fail after a module that returns a view of a parameter.
    """

    parents = frozenset({"Global"})


class Kernel(NamedTuple):
    """One operation that a device runs separately."""

    number: str  # the format of its products: "fp32", TF32, or one of NUMBERS
    flops: int
    bytes: int  # read and written


NUMBERS: Final = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # all others are as fast as fp32, or slower
TF32: Final = "tf32"  # convolutions in fp32, which cuDNN rounds to TF32 by default
_CONVOLUTIONS: Final = frozenset({aten.convolution, aten.convolution_backward})


class Operations(TorchDispatchMode):
    """A mode that counts operations, on tensors with or without data. kernels: the number of runs of each kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[Kernel] = Counter()
        self._flops = FlopCounterMode(display=False, custom_mapping=dict(UNCOUNTED))
        self._flops.mod_tracker = _NoModules()  # type: ignore[assignment]

    @property
    def total(self) -> int:
        """The number of operations; a kernel counts by the larger of its operations and its converted traffic."""
        return sum(n * max(one.flops, OPERATIONS_PER_BYTE * one.bytes) for one, n in self.kernels.items())

    def __enter__(self) -> "Operations":
        self._flops.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._flops.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._flops.get_total_flops()
        result = func(*args, **(kwargs or {}))
        computed = self._flops.get_total_flops() - before
        given = tree_leaves((args, kwargs))
        moved = _moved(func, given, tree_leaves(result))
        if computed or moved:
            self.kernels[Kernel(_number(func, given), computed, moved)] += 1
        return result


def _number(func: Any, given: Iterable[Any]) -> str:
    """Return the number format of an operation's products, such as "bf16", by its first floating point operand."""
    operands = (value.dtype for value in given if isinstance(value, Tensor) and value.is_floating_point())
    number = NUMBERS.get(next(operands, torch.float32), "fp32")
    convolves = isinstance(func, torch._ops.OpOverload) and func.overloadpacket in _CONVOLUTIONS
    return TF32 if convolves and number == "fp32" else number


def _moved(func: Any, given: Iterable[Any], result: Iterable[Any]) -> int:
    """Return the number of bytes that an operation reads and writes; 0 for a view or an allocation."""
    if isinstance(func, torch._ops.OpOverload) and (_is_view(func) or func.overloadpacket in _ALLOCATIONS):
        return 0
    read, written = _bytes(given), _bytes(result)
    if not written:
        return 0  # it only asks for a shape or a dtype
    if isinstance(func, torch._ops.OpOverload) and func.overloadpacket in _LOOKUPS:
        return min(read, written) + written
    return read + written


def _is_view(func: "torch._ops.OpOverload[..., Any]") -> bool:
    """Return whether an operation only returns a view of its inputs, without reading or writing them."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _bytes(values: Iterable[Any]) -> int:
    tensors = {id(value): value for value in values if isinstance(value, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class AllStepsAtOnce(TorchFunctionMode):
    """A mode that runs a recurrent layer as one product over all steps: equally many operations in hardly any time.

    Use it only for tensors without data, as it ignores that steps depend on each other. On such tensors each step of
    torch's loop takes milliseconds. The loop of a GRU would also count all weights as read in each step.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gates = _GATES.get(getattr(func, "__name__", ""))
        if gates and len(args) == 9 and isinstance(args[3], bool):  # else the sequences are packed
            return _recurrent(gates, *args)
        return func(*args, **(kwargs or {}))


class RecurrentRefused(TorchFunctionMode):
    """A mode in which recurrent layers raise RuntimeError: without data they seem to keep nothing for the backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _GATES:
            raise RuntimeError("the memory of a recurrent layer's backward shows only with data")
        return func(*args, **(kwargs or {}))


_GATES: Final = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent(
    gates: int,
    given: Tensor,
    hidden: Any,
    weights: list[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run a recurrent layer on all steps at once, with made-up hidden states. Return tensors with the shapes of the
    results of `torch.lstm`, `torch.gru` or similar.

    weights: for each layer and direction two matrices, two biases if any, and a projection if any.
    """
    states = hidden if isinstance(hidden, tuple | list) else (hidden,)
    directions = 2 if both_ways else 1
    each = len(weights) // (layers * directions)
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            own = weights[(layer * directions + direction) * each :][:each]
            of_input, of_hidden = own[:2]
            offsets = own[2:4] if biases else (None, None)
            before = given.new_zeros(*given.shape[:-1], of_hidden.shape[1]).requires_grad_(given.requires_grad)
            linear = torch.nn.functional.linear
            sums = linear(given, of_input, offsets[0]) + linear(before, of_hidden, offsets[1])
            output = torch.sigmoid(sums).view(*sums.shape[:-1], gates, -1).sum(-2)
            projects = each - (4 if biases else 2)
            outputs.append(linear(output, own[-1]) if projects else output)
        given = torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            given = torch.dropout(given, dropout, train)
    return (given, *(state.clone() for state in states))
