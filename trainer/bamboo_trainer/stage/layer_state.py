"""States of single layers, in memory, in frames and in checkpoints. A stage of any split can be restored from them.

Names are like "parameter:0.weight", "constant:0.mask" and "state:0.weight:exp_avg". A tied parameter, with its
optimizer state, belongs only to the layer of its group's first name. Any other entry of a layer's state_dict is named
like "value:0.x"; it is kept for readers of the state_dict and never restored.

`LateCopies` copies layers' states piece by piece while training continues. Parameters and the optimizer's tensors
change only with the next optimizer step, so until then a piece may be copied whenever the worker waits for others.
Tensors that a forward may change are copied at once.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_trainer.frames import CommonState, Frame, LayerPayload, ReplicaStart
from bamboo_trainer.stage.optimizer_state import OptimizerState, Scalar
from bamboo_trainer.stage.parameters import FlatParameters
from bamboo_trainer.tasks.user_code import named_layer, same_bits

VALUE = "value:"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerState:
    """One layer's state at one version. tensors: in host memory, except `late` ones of `take`.

    scalars: the optimizer's plain numbers. names: the name of each state_dict entry's tensor, which is another layer's
    for some tied parameters; may be empty, see `take`. common: the state of no layer, repeated for each layer.
    """

    layer: int
    version: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Scalar]
    names: Mapping[str, str]
    common: CommonState = field(default_factory=CommonState)

    @classmethod
    def of(cls, frame: Frame) -> "LayerState":
        """Return the state in a frame, which `frames.read` has checked."""
        held: LayerPayload = frame.payload
        tensors = dict(zip(held.tensors, frame.tensors, strict=True))
        address = frame.address
        return cls(
            layer=address.part,
            version=address.step,
            tensors=tensors,
            scalars=held.scalars,
            names=held.names,
            common=held.common,
        )

    def payload(self, *, checkpoint: CheckpointId | None = None, filling: ReplicaStart | None = None) -> LayerPayload:
        """Return the payload for a frame with this state's tensors. checkpoint: the checkpoint or cut whose layers
        another worker has requested, if any. filling: set if the stage's whole state is sent to another worker.
        """
        return LayerPayload(
            tensors=tuple(self.tensors),
            scalars=dict(self.scalars),
            names=dict(self.names),
            common=self.common,
            checkpoint=checkpoint,
            filling=filling,
        )


def layer_of(name: str) -> int:
    """Return the layer's number in a name such as "parameter:0.weight" or "state:0.weight:exp_avg"."""
    return int(name.partition(":")[2].partition(".")[0])


def take(
    wanted: Collection[int],
    layers: Mapping[int, nn.Module],
    parameters: FlatParameters,
    optimizer: OptimizerState,
    version: int,
    common: CommonState,
    *,
    shown: bool = True,
    late: tuple[str, ...] = (),
) -> dict[int, LayerState]:
    """Return copies, in host memory, of the wanted layers' states. For a layer of another stage, copy only its tied
    parameters that this stage has, too, with their optimizer state. shown: for this stage's layers, include `names` and
    state_dict entries outside the state (VALUE). late: name prefixes of tensors to return uncopied. Raises TaskError.
    """
    held = {id(tensor): name for name, tensor in parameters.objects()}
    own = {(layer_of(name), id(tensor)): name for name, tensor in parameters.objects()}  # several if shared
    names: dict[int, dict[str, str]] = {index: {} for index in wanted}
    tensors: dict[int, dict[str, Tensor]] = {index: {} for index in wanted}
    scalars: dict[int, dict[str, Scalar]] = {index: {} for index in wanted}
    for name, tensor in (*parameters.named(), *optimizer.named()):
        if layer_of(name) in tensors:
            tensors[layer_of(name)][name] = tensor if name.startswith(late) else _copy(tensor)
    for name, number in optimizer.scalars().items():
        if layer_of(name) in scalars:
            scalars[layer_of(name)][name] = number
    for index in names.keys() & layers.keys() if shown else ():
        for name, tensor in layers[index].state_dict(keep_vars=True).items():
            names[index][name] = own.get((index, id(tensor))) or held.get(id(tensor), f"{VALUE}{index}.{name}")
            if id(tensor) not in held:
                tensors[index][names[index][name]] = _copy(tensor)
    return {
        index: LayerState(
            layer=index,
            version=version,
            tensors=tensors[index],
            scalars=scalars[index],
            names=names[index],
            common=common,
        )
        for index in names
    }


def in_words(layers: Mapping[int, nn.Module], name: str) -> str:
    """Return words for a tensor's name in messages, such as "parameter 'weight' of layer 0 (Linear)"."""
    kind, _, place = name.partition(":")
    index, _, path = place.partition(".")
    layer = layers.get(int(index))
    return f"{kind} {path!r} of {named_layer(layer, int(index)) if layer else f'layer {index}'}"


def needed(layers: Collection[int], parameters: FlatParameters) -> tuple[int, ...]:
    """Return the layers whose states `restore` needs: the stage's own, and the layers its tied parameters belong to."""
    return tuple(sorted({*layers, *(layer_of(name) for name, _ in parameters.named())}))


def restore(
    layers: Collection[int],
    parameters: FlatParameters,
    optimizer: OptimizerState,
    states: Mapping[int, LayerState],
) -> int:
    """Restore a stage's state, and return its version. layers: the stage's. states: of at least the `needed` layers.

    Raises ValueError, with nothing changed, if a state is missing, or the states do not fit each other or the stage.
    """
    wanted = []
    for index in needed(layers, parameters):
        if index not in states:
            raise ValueError(f"the state of layer {index} is missing")
        wanted.append(states[index])
    versions = sorted({state.version for state in wanted})
    if len(versions) != 1:
        raise ValueError(f"the layers' states are of steps {versions[0]} and {versions[-1]}, expected the same step")
    own = dict((*parameters.named(), *optimizer.named()))
    known, possible = own.keys() | optimizer.scalars().keys(), optimizer.prefixes()

    def belongs(index: int, name: str) -> bool:
        return index in layers or name in known or name.startswith(possible)

    given = {n: t for s in wanted for n, t in s.tensors.items() if not n.startswith(VALUE) and belongs(s.layer, n)}
    scalars = {n: v for s in wanted for n, v in s.scalars.items() if belongs(s.layer, n)}
    _check_names(given, scalars, known, optimizer)
    for name in own.keys() & given.keys():
        mine, theirs = own[name], given[name]
        if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            raise ValueError(
                f"the state's {name} is {theirs.dtype} {list(theirs.shape)}, expected {mine.dtype} {list(mine.shape)}"
            )
    optimizer.check_scalars(scalars)
    with torch.no_grad():
        if not optimizer.fixed:
            optimizer.replace_tensors(given)
        for name, tensor in (*parameters.named(), *optimizer.named()):
            if name.startswith("constant:") and same_bits(tensor.detach().cpu(), given[name].detach().cpu()):
                continue  # another stage may share this tensor, and would take a write to it for the task's
            tensor.copy_(given[name])
    optimizer.set_scalars(scalars)
    return versions[0]


def _check_names(
    given: Mapping[str, Tensor], scalars: Mapping[str, Scalar], known: Collection[str], optimizer: OptimizerState
) -> None:
    """Raise ValueError unless the state has this stage's names, each once; `optimizer.may_have` names are optional."""
    if both := sorted(scalars.keys() & given.keys()):
        raise ValueError(f"the state holds {both[0]} twice")
    names = {name for name in given.keys() | scalars.keys() if not optimizer.may_have(name)}
    expected = {name for name in known if not optimizer.may_have(name)}
    if missing := sorted(expected - names):
        raise ValueError(f"the state lacks {missing[0]} of this stage")
    if foreign := sorted(names - expected):
        raise ValueError(f"the state holds {foreign[0]}, which this stage does not have")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


PIECE_BYTES: Final = 16 << 20  # a few milliseconds


class LateCopies:
    """Copies of layers' states, made piece by piece. Parameters and the optimizer's state must not change until `done`.

    layers: the states, complete when `done`. KINDS: name prefixes of the tensors copied piece by piece, if contiguous.
    """

    KINDS: Final = ("parameter:", "state:")

    def __init__(self, layers: Mapping[int, LayerState]) -> None:
        self.layers = layers
        self._pieces: deque[tuple[Tensor, Tensor]] = deque()  # from, to
        for state in layers.values():
            assert isinstance(state.tensors, dict)
            for name, tensor in state.tensors.items():
                if name.startswith(self.KINDS):
                    state.tensors[name] = self._later(tensor.detach())

    def _later(self, source: Tensor) -> Tensor:
        """Return a host tensor that `copy_piece` will fill; a source that is not contiguous is copied at once."""
        if not source.is_contiguous() or source.layout is not torch.strided:
            return source.to("cpu", copy=True)
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        (here, target), length = (source.view(-1), copy.view(-1)), PIECE_BYTES // source.element_size()
        self._pieces.extend((here[i : i + length], target[i : i + length]) for i in range(0, here.numel(), length))
        return copy

    @property
    def done(self) -> bool:
        return not self._pieces

    def copy_piece(self) -> None:
        source, copy = self._pieces.popleft()
        copy.copy_(source)
