"""One stage of the model at one version, and the arithmetic on it. Knows no peers, no schedule, no clock.

Every result is a pure function of (task, seed, version, step, microbatch): an owner, its shadow and a later
replay get the same bits. Parameters are views of one flat buffer and gradients views of one flat accumulator
(each padded to `ALIGNMENT` elements), so a stage's gradient travels and is reduced as a single tensor.
"""

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.data import microbatch_samples, pure_seed
from bamboo_trainer.task import Parts, Task

ALIGNMENT = 16  # elements
SNAPSHOT_FORMAT = 1

# Optimizers whose state starts as all zeros, so that it can be created before the first step.
_ZERO_STATE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)


class TaskError(ValueError):
    """The user's task did what a task may not do; the message says which part of it and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """microbatches: of a whole step, over all pipelines."""

    seed: int
    precision: str  # "fp32" | "bf16"
    max_gradient_norm: float | None
    microbatches: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f'precision must be "fp32" or "bf16", got {self.precision!r}')
        if self.microbatches < 1 or self.micro_batch_size < 1:
            raise ValueError("microbatches and micro_batch_size must be at least 1")
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0:
            raise ValueError(f"max_gradient_norm must be positive, got {self.max_gradient_norm}")

    @property
    def global_batch(self) -> int:
        return self.microbatches * self.micro_batch_size

    def samples(self, step: int, microbatch: int, length: int) -> tuple[int, ...]:
        return microbatch_samples(self.seed, step, microbatch, self.micro_batch_size, self.global_batch, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSegment:
    """A tied group's place in this stage's flat gradient; its gradient is the sum over `stages`."""

    group: int
    offset: int
    size: int
    stages: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Work:
    """One cell's work on one step: the gradient so far, what the backwards need, and the losses."""

    gradient: Tensor  # flat fp32
    contexts: dict[int, tuple[Parts, Parts]] = field(default_factory=dict)  # microbatch -> (inputs, outputs or loss)
    losses: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    name: str  # of a tied group: its first name, wherever that layer lives
    parameter: nn.Parameter
    offset: int
    group: int | None

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.parameter.numel()].view(self.parameter.shape)


def build_layer(task: Task, seed: int, layer: int) -> nn.Module:
    """One layer; its values are a pure function of (seed, layer). Leaves the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(pure_seed("init", seed, layer))
        try:
            module = task.layers[layer]()
        except Exception as error:
            raise TaskError(f"building layer {layer} failed: {_told(error)}") from error
    if not isinstance(module, nn.Module):
        raise TaskError(f"the factory of layer {layer} returned {type(module).__name__}, expected a torch.nn.Module")
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise TaskError(f"parameter {layer}.{name} is {parameter.dtype}, expected torch.float32")
    return module


def run_layer(task_layer: nn.Module, layer: int, parts: Parts) -> Parts:
    """Gives the layer its one tensor, or a tuple of several; what it raises becomes a TaskError."""
    try:
        result = task_layer(parts[0] if len(parts) == 1 else parts)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise TaskError(f"layer {layer} ({type(task_layer).__name__}) raised {_told(error)}") from error
    result = (result,) if isinstance(result, Tensor) else result
    if not isinstance(result, tuple) or not result or not all(isinstance(p, Tensor) for p in result):
        raise TaskError(
            f"layer {layer} ({type(task_layer).__name__}) must return a tensor or a tuple of tensors, "
            f"not {type(result).__name__}"
        )
    return result


def forward_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """What the global generator is seeded with right before a layer's forward (dropout)."""
    return pure_seed("forward", seed, step, microbatch, layer)


class Stage:
    """The state of one stage and its forward, backward and optimizer step.

    The boundary contract: outputs are all parts; gradients are those of the floating-point parts only, in
    order (integer parts have none). An unused floating-point part has a gradient of zeros. Saved contexts
    keep the inputs they were given (no copy): reuse a pooled buffer only after the microbatch's backward.
    """

    def __init__(
        self,
        task: Task,
        stage: int,
        stages: Sequence[tuple[int, int]],
        config: TrainingConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        self.version = 0
        self._task, self._stage, self._stages, self._config = task, stage, tuple(stages), config
        self._device = torch.device(device)
        self._first, self._end = stages[stage]
        self._layers = {i: build_layer(task, config.seed, i) for i in range(self._first, self._end)}
        groups = tied_groups(task)
        self._constants: dict[str, Tensor] = {}  # buffers and frozen parameters
        self._slots: list[_Slot] = []
        self.size = 0
        self._collect(tie(self._layers, groups, task, config.seed))
        self._flat = self._flatten()
        self._bound: Tensor | None = None
        self._optimizer = self._build_optimizer()
        self._eager = self._create_optimizer_state()
        self._checked_buffers = False
        self._tied = self._tied_segments(groups)

    @property
    def last(self) -> bool:
        return self._stage == len(self._stages) - 1

    def begin(self) -> Work:
        return Work(torch.zeros(self.size, dtype=torch.float32, device=self._device))

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Detached outputs, or () on the last stage. `inputs` is None on stage 0, which loads the data.

        Repeating it for a microbatch gives the same bits and replaces the saved context.
        """
        assert (inputs is None) == (self._stage == 0)
        if inputs is None:
            leaves = self._load(step, microbatch)[0]
        else:
            leaves = tuple(p.detach().requires_grad_(p.is_floating_point()) for p in inputs)
        before = None if self._checked_buffers else self._buffer_copies()
        parts = leaves
        with torch.enable_grad():
            for index, layer in self._layers.items():
                torch.manual_seed(forward_seed(self._config.seed, step, microbatch, index))
                with autocast(self._device, self._config.precision):
                    parts = run_layer(layer, index, parts)
            if self.last:
                targets = self._load(step, microbatch)[1]
                parts = (task_loss(self._task, parts, targets),)
        if before is not None:
            self._check_buffers(before)
        work.contexts[microbatch] = (leaves, parts)
        if self.last:
            work.losses[microbatch] = float(parts[0].detach())
            return ()
        return tuple(p.detach() for p in parts)

    def backward(self, work: Work, step: int, microbatch: int, gradients: Parts | None) -> Parts:
        """Adds to work.gradient; returns the gradients of the floating-point inputs, () on stage 0.

        `gradients` belong to the floating-point outputs; None on the last stage, which starts from
        loss / microbatches. The saved context is used up.
        """
        assert (gradients is None) == self.last
        leaves, outputs = work.contexts.pop(microbatch)
        self._bind(work.gradient)
        if gradients is None:
            outputs, gradients = (outputs[0] / self._config.microbatches,), (torch.ones_like(outputs[0]),)
        floating = [p for p in outputs if p.is_floating_point()]
        if len(floating) != len(gradients):
            raise ValueError(f"expected {len(floating)} gradients for stage {self._stage}, got {len(gradients)}")
        pairs = [(p, g) for p, g in zip(floating, gradients, strict=True) if p.requires_grad]
        if pairs:
            try:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except RuntimeError as error:
                layers = f"layers {self._first} to {self._end - 1}"
                raise TaskError(
                    f"the backward of {layers} failed at step {step}, microbatch {microbatch}: {_told(error)}"
                ) from error
        if self._stage == 0:
            return ()
        return tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in leaves if p.is_floating_point())

    def norm_squared(self, gradient: Tensor) -> float:
        """The sum of squares in fp64. A tied parameter counts on its lowest stage only."""
        elsewhere = {s.group for s in self._tied if s.stages[0] != self._stage}
        total = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for slot in self._slots:
            if slot.group is None or slot.group not in elsewhere:
                total += slot.of(gradient).double().square().sum()
        return float(total)

    def apply(self, gradient: Tensor, norm: float) -> None:
        """One optimizer step with the final gradient, which is not modified; `norm` is the global one."""
        limit = self._config.max_gradient_norm
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        if self._optimizer is not None:
            self._bind(gradient * scale)  # a copy: an optimizer may write to its gradients
            rate = float(self._task.learning_rate(self.version))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._unbind()
        self.version += 1

    def snapshot(self) -> tuple[Parts, dict[str, Any]]:
        """Copies of the whole state: one tensor per parameter, buffer and optimizer tensor.

        meta: {"format", "version", "names": of the parts, "scalars": the optimizer's plain numbers by name}.
        Names are "parameter:0.weight", "constant:0.mask", "state:0.weight:exp_avg"; a tied parameter has its
        group's first name.
        """
        named = list(self._named())
        meta = {
            "format": SNAPSHOT_FORMAT,
            "version": self.version,
            "names": [name for name, _ in named],
            "scalars": self._scalars(),
        }
        return tuple(t.detach().clone() for _, t in named), meta

    def restore(self, parts: Parts, meta: Mapping[str, Any]) -> None:
        """Takes a snapshot's state over; ValueError, with nothing changed, if it does not fit this stage."""
        names, scalars, version = self._checked_meta(parts, meta)
        given = dict(zip(names, parts, strict=True))
        own = dict(self._named())
        self._check_names(given, scalars, own)
        for name in own.keys() & given.keys():
            part, tensor = given[name], own[name]
            if part.shape != tensor.shape or part.dtype != tensor.dtype:
                raise ValueError(
                    f"the snapshot's {name} is {part.dtype} {list(part.shape)}, "
                    f"expected {tensor.dtype} {list(tensor.shape)}"
                )
        with torch.no_grad():
            if not self._eager:
                self._rebuild_state(given)
            for name, tensor in self._named():
                tensor.copy_(given[name])
        self._set_scalars(scalars)
        self.version = version

    def digest(self) -> str:
        """sha256 of parameters, buffers and optimizer state; equal digests mean bit-equal state."""
        digest = hashlib.sha256()
        for name, tensor in self._named():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            data = tensor.detach().cpu().contiguous()
            digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b"")
        digest.update(repr(sorted(self._scalars().items())).encode())
        return digest.hexdigest()

    def tied_segments(self) -> tuple[TiedSegment, ...]:
        """The tied groups that other stages hold too."""
        return self._tied

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies by "layers.<layer>.<name>": parameters (tied ones by every name) and persistent buffers."""
        return {
            f"layers.{index}.{name}": tensor.detach().clone()
            for index, layer in self._layers.items()
            for name, tensor in layer.state_dict().items()
        }

    def _load(self, step: int, microbatch: int) -> tuple[Parts, Parts]:
        dataset = self._task.dataset
        inputs, targets = load_batch(self._task, self._config.samples(step, microbatch, len(dataset)))
        return tuple(p.to(self._device) for p in inputs), tuple(p.to(self._device) for p in targets)

    def _collect(self, shared: Mapping[int, tuple[int, str]]) -> None:
        seen: set[int] = set()
        for index, layer in self._layers.items():
            layer.to(self._device)
            for name, parameter in layer.named_parameters():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                group, canonical = shared.get(id(parameter), (None, f"{index}.{name}"))
                if not parameter.requires_grad:
                    self._constants[canonical] = parameter
                    continue
                self._slots.append(_Slot(canonical, parameter, self.size, group))
                self.size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            for name, buffer in layer.named_buffers():
                self._constants[f"{index}.{name}"] = buffer

    def _flatten(self) -> Tensor:
        flat = torch.zeros(self.size, dtype=torch.float32, device=self._device)
        for slot in self._slots:
            view = slot.of(flat)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        return flat

    def _bind(self, gradient: Tensor) -> None:
        if self._bound is gradient:
            return
        if gradient.shape != (self.size,) or gradient.dtype != torch.float32:
            raise ValueError(
                f"the gradient of stage {self._stage} must be float32 [{self.size}], "
                f"got {gradient.dtype} {list(gradient.shape)}"
            )
        for slot in self._slots:
            slot.parameter.grad = slot.of(gradient)
        self._bound = gradient

    def _unbind(self) -> None:
        for slot in self._slots:
            slot.parameter.grad = None
        self._bound = None

    def _build_optimizer(self) -> torch.optim.Optimizer | None:
        if not self._slots:
            return None
        optimizer = self._task.optimizer([(s.name, s.parameter) for s in self._slots])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TaskError(f"task.optimizer returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        return optimizer

    def _create_optimizer_state(self) -> bool:
        """Creates the state where its start is known; False if it only comes with the first step."""
        optimizer = self._optimizer
        if optimizer is None:
            return True
        zero_sgd = type(optimizer) is torch.optim.SGD and not any(g["dampening"] for g in optimizer.param_groups)
        if type(optimizer) not in _ZERO_STATE and not zero_sgd:
            return type(optimizer) is torch.optim.Adagrad  # its constructor creates it
        saved = self._flat.clone()
        self._bind(torch.zeros_like(self._flat))
        optimizer.step()
        self._unbind()
        with torch.no_grad():
            self._flat.copy_(saved)
            for _, tensor in self._state_entries():
                tensor.zero_()
        return True

    def _state_entries(self) -> Iterator[tuple[str, Tensor]]:
        for name, key, value in self._state_values():
            if isinstance(value, Tensor):
                yield f"state:{name}:{key}", value

    def _state_values(self) -> Iterator[tuple[str, str, Any]]:
        if self._optimizer is not None:
            for slot in self._slots:
                state = self._optimizer.state.get(slot.parameter, {})
                for key in sorted(state):
                    yield slot.name, key, state[key]

    def _scalars(self) -> dict[str, int | float | bool | None]:
        scalars: dict[str, int | float | bool | None] = {}
        for name, key, value in self._state_values():
            if isinstance(value, Tensor):
                continue
            if value is not None and not isinstance(value, int | float):
                raise TaskError(f"the optimizer's state {key} is {type(value).__name__}, expected tensors and numbers")
            scalars[f"state:{name}:{key}"] = value
        return scalars

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """The whole state in fixed order; the tensors themselves."""
        for slot in self._slots:
            yield f"parameter:{slot.name}", slot.parameter
        for name, constant in self._constants.items():
            yield f"constant:{name}", constant
        yield from self._state_entries()

    def _checked_meta(self, parts: Parts, meta: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], int]:
        if meta.get("format") != SNAPSHOT_FORMAT:
            raise ValueError(f"unknown snapshot format {meta.get('format')!r}, expected {SNAPSHOT_FORMAT}")
        names, scalars, version = meta.get("names"), meta.get("scalars"), meta.get("version")
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise ValueError("the snapshot's names must be a list of texts")
        if len(set(names)) != len(names) or len(names) != len(parts):
            raise ValueError(f"the snapshot names {len(set(names))} distinct parts and holds {len(parts)}")
        if not isinstance(scalars, dict):
            raise ValueError("the snapshot's scalars must be a mapping")
        if type(version) is not int or version < 0:
            raise ValueError(f"the snapshot's version must be a number of steps, got {version!r}")
        return list(names), scalars, version

    def _check_names(self, given: Mapping[str, Tensor], scalars: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
        """Exactly this stage's names; if the optimizer has no fixed state, any of its slots'."""
        found, expected = given.keys() | scalars.keys(), own.keys() | self._scalars().keys()
        if not self._eager:
            slots = tuple(f"state:{s.name}:" for s in self._slots)
            found = {n for n in found if not n.startswith(slots)}
            expected = {n for n in expected if not n.startswith(slots)}
        if missing := sorted(expected - found):
            raise ValueError(f"the snapshot lacks {missing[0]} of stage {self._stage}")
        if foreign := sorted(found - expected):
            raise ValueError(f"the snapshot holds {foreign[0]}, which stage {self._stage} has not")

    def _rebuild_state(self, given: Mapping[str, Tensor]) -> None:
        if self._optimizer is None:
            return
        for slot in self._slots:
            prefix = f"state:{slot.name}:"
            state = {n.removeprefix(prefix): p.detach().clone() for n, p in given.items() if n.startswith(prefix)}
            self._optimizer.state.pop(slot.parameter, None)
            if state:
                self._optimizer.state[slot.parameter] = state

    def _set_scalars(self, scalars: Mapping[str, Any]) -> None:
        for slot in self._slots:
            prefix = f"state:{slot.name}:"
            for name, value in scalars.items():
                if name.startswith(prefix) and self._optimizer is not None:
                    self._optimizer.state[slot.parameter][name.removeprefix(prefix)] = value

    def _tied_segments(self, groups: Mapping[str, tuple[int, str]]) -> tuple[TiedSegment, ...]:
        holders: dict[int, set[int]] = {}
        for name, (group, _) in groups.items():
            layer = int(name.partition(".")[0])
            stage = next(s for s, (first, end) in enumerate(self._stages) if first <= layer < end)
            holders.setdefault(group, set()).add(stage)
        return tuple(
            TiedSegment(
                group=slot.group,
                offset=slot.offset,
                size=slot.parameter.numel(),
                stages=tuple(sorted(holders[slot.group])),
            )
            for slot in self._slots
            if slot.group is not None and len(holders[slot.group]) > 1
        )

    def _buffer_copies(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": buffer.detach().clone()
            for index, layer in self._layers.items()
            for name, buffer in layer.named_buffers()
        }

    def _check_buffers(self, before: Mapping[str, Tensor]) -> None:
        after = self._buffer_copies()
        for name in sorted(before.keys() | after.keys()):
            old, new = before.get(name), after.get(name)
            if old is None or new is None or not _same_bits(old, new):
                layer, _, buffer = name.partition(".")
                kind = type(self._layers[int(layer)]).__name__
                raise TaskError(
                    f"layer {layer} ({kind}) changes its buffer {buffer!r} "
                    "in the forward, so a repeated forward would differ "
                    "(use LayerNorm or GroupNorm instead of BatchNorm)"
                )
        self._checked_buffers = True


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """bf16: products in bfloat16, parameters in fp32. Entered per layer, so no cast weight is shared."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def task_loss(task: Task, outputs: Parts, targets: Parts) -> Tensor:
    """The loss in fp32, checked to be a scalar that depends on the model."""
    outputs = tuple(p.float() if p.is_floating_point() else p for p in outputs)
    try:
        loss = task.loss(outputs, targets)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise TaskError(f"the loss raised {_told(error)}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise TaskError("the loss must be a scalar tensor")
    if not loss.requires_grad:
        raise TaskError("the loss does not depend on any parameter or input that requires a gradient")
    return loss.reshape(())


def load_batch(task: Task, indices: Sequence[int]) -> tuple[Parts, Parts]:
    """The dataset's answer for these samples; anything it raises becomes a TaskError."""
    try:
        return task.dataset.batch(indices)
    except Exception as error:
        raise TaskError(f"the dataset raised {_told(error)} for samples {list(indices)[:8]}") from error


def tied_groups(task: Task) -> dict[str, tuple[int, str]]:
    """Of every tied name its group's number and first name. Raises TaskError for names that cannot be."""
    groups: dict[str, tuple[int, str]] = {}
    for number, names in enumerate(task.tied):
        if len(set(names)) < 2:
            raise TaskError(f"tied group {number} names {len(set(names))} parameters, expected at least two")
        for name in names:
            layer, _, parameter = name.partition(".")
            if not layer.isdecimal() or int(layer) >= len(task.layers) or not parameter:
                raise TaskError(f'tied name {name!r} is not "<layer index>.<parameter name>" of this task')
            if name in groups:
                raise TaskError(f"tied name {name!r} appears twice")
            groups[name] = (number, names[0])
    return groups


def tie(
    layers: Mapping[int, nn.Module], groups: Mapping[str, tuple[int, str]], task: Task, seed: int
) -> dict[int, tuple[int, str]]:
    """Makes the tied parameters one object per group, with the value of the group's first name.

    Returns each shared object's group and first name, by its id.
    """
    shared: dict[int, nn.Parameter] = {}
    for name, (group, first) in groups.items():
        index, path = _split(name)
        if index not in layers:
            continue
        mine = _parameter(layers[index], index, path)
        if group not in shared:
            first_index, first_path = _split(first)
            source = layers[first_index] if first_index in layers else build_layer(task, seed, first_index)
            shared[group] = _parameter(source, first_index, first_path)
        one = shared[group]
        if mine.shape != one.shape or mine.requires_grad != one.requires_grad:
            raise TaskError(f"tied parameters {first} {list(one.shape)} and {name} {list(mine.shape)} differ")
        for module in layers[index].modules():
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter is mine:
                    setattr(module, leaf, one)
    firsts = dict(groups.values())
    return {id(parameter): (group, firsts[group]) for group, parameter in shared.items()}


def _split(name: str) -> tuple[int, str]:
    index, _, path = name.partition(".")
    return int(index), path


def _parameter(layer: nn.Module, index: int, path: str) -> nn.Parameter:
    try:
        return layer.get_parameter(path)
    except AttributeError:
        raise TaskError(f"tied parameter {index}.{path}: layer {index} has no parameter {path!r}") from None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
