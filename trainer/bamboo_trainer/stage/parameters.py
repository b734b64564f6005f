"""A stage's parameters in a flat layout: their gradients are one tensor, sent and reduced in a few large pieces.

After each parameter's gradient comes its mark: more than zero if a backward of the step has reached the parameter. The
optimizer skips parameters whose mark is zero, just as it skips a parameter whose `grad` is None in plain PyTorch. The
mark is part of the gradient, so it is summed, sent, logged and repeated with it. So are the sums of norms' running
statistics, which follow a layer's parameters.

The first stage's gradient, if large, is divided into buckets (`Bucket`), mostly of consecutive layers. With several
pipelines, the last microbatch's backward may run bucket by bucket. Its forward is then cut where buckets begin, as
between stages: the inputs of a bucket's first layer are leaves, so the backward of the bucket ends there, and the
backward of the next bucket starts with the leaves' gradients. As between stages, the cuts change no bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.mixed_precision import kept_in_fp32
from bamboo_trainer.tasks.running_buffers import Parts as NormSumsParts
from bamboo_trainer.tasks.running_buffers import RunningNorm, intercept, running_norms
from bamboo_trainer.tasks.task_errors import TaskError

BUCKET_BYTES: Final = 8 << 20  # of a gradient in fp32; less is not worth separate frames
MOST_BUCKETS: Final = 8

# Where a backward begins, with the gradients: tensors, or their graph edges without the values.
Ends = Sequence[tuple[Tensor | GradientEdge, Tensor]]


class Bucket(NamedTuple):
    """A range of a stage's flat gradient. layer: the layer whose backward completes it. place: in elements."""

    layer: int
    place: slice


def buckets_of(starts: Mapping[int, int], size: int, gradient_size: int) -> tuple[Bucket, ...]:
    """Divide a stage's flat gradient into buckets, in the order of a backward: the last layers first.

    starts: where each layer's gradients begin, in elements. size, gradient_size: see `FlatParameters`; the elements
    between the two, for further uses of tied parameters, become the last bucket unless only one bucket exists.

    A stage that is not the first one has one bucket: while its last gradients are summed, earlier stages still compute.
    """
    first, end, buckets = min(starts), size, list[Bucket]()
    least = max(BUCKET_BYTES // 4, -(-size // MOST_BUCKETS))
    for layer in sorted(starts, reverse=True):
        if end - starts[layer] >= least:
            buckets.append(Bucket(layer, slice(starts[layer], end)))
            end = starts[layer]
    if first > 0 or len(buckets) < 2:
        return (Bucket(first, slice(0, gradient_size)),)
    last = buckets.pop()  # together with the remaining first layers, too few for a bucket of their own
    buckets.append(Bucket(first, slice(0, last.place.stop)))
    if gradient_size > size:
        buckets.append(Bucket(first, slice(size, gradient_size)))
    return tuple(buckets)


class Cut(NamedTuple):
    """A cut of a forward between two layers, where a bucket begins. passed: the outputs of the layer before the cut.

    leaves: the same tensors, detached, for the layer after the cut. losses: how many losses earlier layers have added.
    """

    passed: Parts
    leaves: Parts
    losses: int

    @classmethod
    def at(cls, parts: Parts, losses: int) -> "Cut":
        return cls(parts, tuple(part.detach().requires_grad_(part.requires_grad) for part in parts), losses)


class BackwardPart(NamedTuple):
    """One part of a backward. ends: where the part begins (`Ends`). last: it is the backward's last part."""

    ends: Ends
    last: bool


def parts_of(ends: Ends, added: int, cuts: Sequence[Cut]) -> Iterator[BackwardPart]:
    """Yield the parts of a backward, last layers first. Run each part before requesting the next. ends: where the whole
    backward begins; the last `added` of them are losses that layers have added, in order.
    """
    whole = len(ends) - added
    ends, losses = ends[:whole], ends[whole:]
    for cut in reversed(cuts):
        yield BackwardPart([*ends, *losses[cut.losses :]], last=False)
        losses = losses[: cut.losses]
        pairs = zip(cut.passed, cut.leaves, strict=True)
        ends = [(part, leaf.grad) for part, leaf in pairs if leaf.grad is not None]
    yield BackwardPart([*ends, *losses], last=True)


class NormPlace(NamedTuple):
    """A layer's norm with running statistics, and the offset of its sums in the flat gradient, in elements."""

    layer: int
    norm: RunningNorm
    offset: int

    def of(self, gradient: Tensor) -> Tensor:
        return gradient[self.offset : self.offset + self.norm.size]


NormSums = Sequence[tuple[NormPlace, Tensor]]


def norm_sums(
    norms: Sequence[NormPlace], captured: Sequence[tuple[nn.Module, NormSumsParts]], following: int
) -> NormSums:
    """Return a microbatch's part of the sums for norms' running statistics. following: number of later microbatches.

    Raises TaskError for a captured norm that is not in `norms`.
    """
    places = {id(place.norm.module): place for place in norms}
    batches: dict[int, list[NormSumsParts]] = {}
    for module, given in captured:
        if id(module) not in places:
            raise TaskError(
                f"a forward uses {type(module).__name__} with running statistics, which is none of the layer's modules "
                "(Module.named_modules): let the layer have it as an attribute"
            )
        batches.setdefault(id(module), []).append(given)
    return [(places[key], places[key].norm.weighed(given, following)) for key, given in batches.items()]


def add_norm_sums(gradient: Tensor, sums: NormSums) -> None:
    for place, added in sums:
        place.of(gradient).add_(added)


ALIGNMENT = 16  # a parameter's place, with its mark, is padded to a multiple of this many elements


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A parameter's place in the stage's flat buffers. offset: in elements."""

    name: str  # of a tied group: its first name, in any layer
    parameter: nn.Parameter
    offset: int
    group: int | None  # of tied parameters

    @property
    def mark(self) -> int:
        """The index of the parameter's mark in the flat gradient. The mark of an unused parameter is zero."""
        return self.offset + self.parameter.numel()

    @property
    def size(self) -> int:
        """The number of elements of the parameter and its mark."""
        return self.parameter.numel() + 1

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of the parameter's place in a flat contiguous tensor, in the parameter's shape. A single
        operation creates it, because binding a gradient needs many such views.
        """
        shape = self.parameter.shape
        return flat.as_strided(shape, contiguous_strides(shape), flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedUse:
    """One layer's use of a tied parameter. offset: where the gradient of this use begins in this stage's flat gradient,
    in elements; None for a layer of another stage.
    """

    stage: int
    layer: int
    offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSegment:
    """A trained tied group of this stage that several layers use, perhaps also layers of other stages.

    Each layer's use has its own gradient. These gradients are summed in layer order, so that the sum does not depend on
    the split. offset, size: the place of the sum, with its mark, in this stage's final gradient, in elements. uses: on
    all stages, in layer order.
    """

    group: int
    offset: int
    size: int
    uses: tuple[TiedUse, ...]

    @property
    def stages(self) -> frozenset[int]:
        return frozenset(use.stage for use in self.uses)

    def places(self, stage: int) -> list[slice]:
        """Return the ranges of this stage's flat gradient for its own layers' uses, in order. stage: its number."""
        offsets = [use.offset for use in self.uses if use.stage == stage and use.offset is not None]
        return [slice(offset, offset + self.size) for offset in offsets]


def tied_segments(
    parameters: "FlatParameters", groups: Mapping[str, tuple[int, str]], stages: Sequence[tuple[int, int]]
) -> tuple[TiedSegment, ...]:
    """Return a stage's trained tied groups that several layers use, by group number. groups: from `tied_groups`."""
    layers: dict[int, set[int]] = {}
    for name, (group, _) in groups.items():
        layers.setdefault(group, set()).add(int(name.partition(".")[0]))
    stage_of = {layer: s for s, (first, end) in enumerate(stages) for layer in range(first, end)}
    return tuple(
        TiedSegment(
            group=slot.group,
            offset=slot.offset,
            size=slot.size,
            uses=tuple(
                TiedUse(stage=stage_of[layer], layer=layer, offset=parameters.uses.get((slot.group, layer)))
                for layer in sorted(layers[slot.group])
            ),
        )
        for slot in sorted(parameters.slots, key=lambda slot: -1 if slot.group is None else slot.group)
        if slot.group is not None and len(layers[slot.group]) > 1
    )


class FlatParameters:
    """A stage's tensors: trained parameters in `flat` ([size]), and `constants` (buffers, frozen parameters).

    dtype: the type of `flat`, to which parameters are rounded. Norms' parameters stay in fp32, and outside of `flat` if
    `dtype` is another type. Backwards add all gradients up in fp32.

    A trained tied parameter has one slot. Each layer that uses it has a parameter of its own, with the same memory, and
    a place of its own in the gradient: the stage's first such layer has the slot's place, others places after all
    slots. So a gradient has `gradient_size` elements until the layers' are summed (`TiedSegment`), then `size`.

    layers: by number; moved to the device. shared: the tied parameters' group and name, by id, from `ties.tie`. uses:
    by tied group and layer, the offset of that layer's gradient, in elements. norms: norms whose running
    statistics forwards leave unchanged from now on. buckets: the gradient's buckets.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        shared: Mapping[int, tuple[int, str]],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.slots: list[Slot] = []
        self.constants: dict[str, Tensor] = {}
        self.size = 0
        self.uses: dict[tuple[int, int], int] = {}
        self.norms: list[NormPlace] = []
        self._others: list[tuple[Slot, int, nn.Parameter]] = []  # a tied slot's use by a further layer
        self._dtype, self._starts = dtype, dict[int, int]()  # where each layer's slots begin
        self._collect(layers, shared, device)
        self.flat = torch.zeros(self.size, dtype=dtype, device=device)
        self.gradient_size = self.size
        for slot in self.slots:
            if slot.parameter.dtype is dtype:
                view = slot.of(self.flat)
                view.copy_(slot.parameter.detach())
                slot.parameter.data = view
            else:
                slot.parameter.data = slot.parameter.data.contiguous()  # as fused optimizers and gradients have it
        self._places = list(self.slots)  # of the gradients
        for slot, layer, parameter in self._others:
            parameter.data = slot.parameter.data
            self._places.append(replace(slot, parameter=parameter, offset=self.gradient_size))
            assert slot.group is not None
            self.uses[slot.group, layer] = self.gradient_size
            self.gradient_size += _padded(slot.size)
        self.buckets = buckets_of(self._starts, self.size, self.gradient_size)
        self._bound: Tensor | None = None
        self._marks = torch.tensor([place.mark for place in self._places], dtype=torch.int64, device=device)
        self._slot_marks = torch.tensor([slot.mark for slot in self.slots], dtype=torch.int64)  # for any device
        self._reached: dict[int, Tensor] = {}  # by number of the place: parameters whose gradient a backward changed
        for number, place in enumerate(self._places):
            note = partial(self._reached.__setitem__, number)  # holds nothing of the stage, which is freed at once
            place.parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        held = [self.flat, *(slot.parameter for slot in self.slots), *self.constants.values()]
        strided = [t for t in held if t.layout is torch.strided]  # `checksums.check` refuses the others
        self._storages = {t.untyped_storage().data_ptr() for t in strided if t.numel()}

    def _collect(
        self, layers: Mapping[int, nn.Module], shared: Mapping[int, tuple[int, str]], device: torch.device
    ) -> None:
        seen: set[int] = set()
        tied: dict[int | None, Slot] = {}
        for index, layer in layers.items():
            self._starts[index] = self.size
            layer.to(device)
            precise = kept_in_fp32(layer)
            for name, parameter in layer.named_parameters():
                group, canonical = shared.get(id(parameter), (None, f"{index}.{name}"))
                if not parameter.requires_grad:  # each layer has it, wherever the others are that share it
                    self.constants[canonical] = parameter
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if id(parameter) not in precise:
                    parameter.data = parameter.data.to(self._dtype)
                if not parameter.requires_grad:
                    continue
                if group in tied:
                    self._others.append((tied[group], index, parameter))
                    continue
                slot = Slot(canonical, parameter, self.size, group)
                self.slots.append(slot)
                if group is not None:
                    tied[group], self.uses[group, index] = slot, slot.offset
                self.size += _padded(slot.size)
            for name, buffer in layer.named_buffers():
                self.constants[f"{index}.{name}"] = buffer
            for norm in running_norms(layer):
                intercept(norm.module)
                self.norms.append(NormPlace(index, norm, self.size))
                self.size += _padded(norm.size)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the same storage as a parameter or constant, such as a view of one."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def bind(self, gradient: Tensor) -> None:
        """Make the parameters' gradients views of this tensor, fp32 [gradient_size], so that backwards add to it."""
        if self._bound is gradient:
            return
        assert gradient.shape == (self.gradient_size,)
        assert gradient.dtype == torch.float32
        self.unbind()
        for place in self._places:
            if self._dtype is not torch.float32:
                place.parameter.grad_dtype = torch.float32
            place.parameter.grad = place.of(gradient)
        self._bound = gradient

    def release(self, gradient: Tensor) -> list[Tensor]:
        """Unbind, so that the next backward gives each parameter a gradient of its own, in fp32. Return the parameters'
        views of `gradient`, for `add_to`.
        """
        bound = self._bound is gradient
        places = [place.parameter.grad if bound else place.of(gradient) for place in self._places]
        self.unbind()
        for place in self._places if self._dtype is not torch.float32 else ():
            place.parameter.grad_dtype = torch.float32
        return [place for place in places if place is not None]

    def add_to(self, gradient: Tensor, places: Sequence[Tensor]) -> None:
        """Add gradients since `release` to `gradient`, mark their parameters, and unbind. places: from `release`."""
        own = [place.parameter.grad for place in self._places]
        reached = [number for number, grad in enumerate(own) if grad is not None]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in own if grad is not None]
        if reached:
            torch._foreach_add_([places[number] for number in reached], dense)
            marks = self._marks if len(reached) == len(self._places) else self._marks[reached]
            gradient.index_add_(0, marks, torch.ones_like(marks, dtype=torch.float32))
        self._reached.clear()
        self.unbind()

    def bind_final(self, gradient: Tensor, used: Sequence[bool] | None = None) -> None:
        """Set the `grad` of each slot's parameter to its part of the final gradient, [size], in the parameter's dtype.

        used: by slot; an unused parameter's `grad` becomes None. Without `used`, all parameters count as used.
        """
        self.unbind()
        for number, slot in enumerate(self.slots):
            dtype = slot.parameter.dtype
            if self._dtype is not torch.float32:
                slot.parameter.grad_dtype = dtype
            slot.parameter.grad = slot.of(gradient).to(dtype) if used is None or used[number] else None

    def mark(self, gradient: Tensor, marked: set[int]) -> None:
        """Mark newly reached parameters in `gradient`. marked: numbers of those marked there already; updated."""
        new = sorted(self._reached.keys() - marked)
        self._reached.clear()
        if new:  # selecting marks takes longer than writing them
            marks = self._marks if len(new) == len(self._places) else self._marks[new]
            gradient.index_fill_(0, marks, 1.0)
            marked.update(new)

    def used(self, gradient: Tensor) -> list[bool]:
        """Return, for each slot, whether a backward has reached its parameter, by the final gradient's marks."""
        return [mark > 0 for mark in gradient[self._slot_marks].tolist()]

    def unbind(self) -> None:
        for place in self._places:
            place.parameter.grad = None
        self._bound = None

    def trained(self) -> Iterator[nn.Parameter]:
        """Yield all trained parameters; for a tied one, the parameter of each of the stage's layers that use it."""
        return (place.parameter for place in self._places)

    def objects(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by name, as `named` does, but a trained tied parameter once for each layer that uses it."""
        yield from self.named()
        yield from ((f"parameter:{slot.name}", parameter) for slot, _, parameter in self._others)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the slots' parameters and the constants, not copied, by name and in fixed order."""
        for slot in self.slots:
            yield f"parameter:{slot.name}", slot.parameter
        for name, constant in self.constants.items():
            yield f"constant:{name}", constant


@lru_cache(maxsize=4096)
def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(strides[::-1])


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
