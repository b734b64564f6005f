"""A stage's state layer by layer, as checkpoints hold it, so that a stage of any split can restore it.

Names are those of a snapshot: "parameter:0.weight", "constant:0.mask", "state:0.weight:exp_avg". A tied parameter, with
its optimizer state, belongs to the layer of its group's first name, and to no other. "value:0.x" is an entry of a
layer's state_dict that is neither; it is kept for readers of the state dict, and never restored.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bamboo_trainer.stage.state.group_numbers import Scalar
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.stage.state.snapshot import SNAPSHOT_FORMAT
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.user_code import named_layer

VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerState:
    """One layer's state at one version. tensors: in host memory. scalars: the optimizer's plain numbers.

    names: for each name in the layer's state_dict, the name of its tensor; a tied one may be another layer's.
    """

    layer: int
    version: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Scalar]
    names: Mapping[str, str]


def layer_of(name: str) -> int:
    """Return the layer whose state has a tensor or number of that name."""
    return int(name.partition(":")[2].partition(".")[0])


def take(
    layers: Mapping[int, nn.Module],
    parameters: FlatParameters,
    optimizer: OptimizerState,
    version: int,
    *,
    shown: bool = True,
    late: tuple[str, ...] = (),
) -> dict[int, LayerState]:
    """Return copies of the state of these layers. shown: with names and values of their state dicts.

    late: prefixes of names; their tensors are returned themselves, to be copied later.
    """
    held = {id(tensor): name for name, tensor in parameters.objects()}
    own = {(layer_of(name), id(tensor)): name for name, tensor in parameters.objects()}  # several if shared
    names: dict[int, dict[str, str]] = {index: {} for index in layers}
    tensors: dict[int, dict[str, Tensor]] = {index: {} for index in layers}
    scalars: dict[int, dict[str, Scalar]] = {index: {} for index in layers}
    for name, tensor in (*parameters.named(), *optimizer.named()):
        if layer_of(name) in layers:
            tensors[layer_of(name)][name] = tensor if name.startswith(late) else _copy(tensor)
    for name, number in optimizer.scalars().items():
        if layer_of(name) in layers:
            scalars[layer_of(name)][name] = number
    for index, layer in layers.items() if shown else ():
        for name, tensor in layer.state_dict(keep_vars=True).items():
            names[index][name] = own.get((index, id(tensor))) or held.get(id(tensor), f"{VALUE}:{index}.{name}")
            if id(tensor) not in held:
                tensors[index][names[index][name]] = _copy(tensor)
    return {
        index: LayerState(
            layer=index, version=version, tensors=tensors[index], scalars=scalars[index], names=names[index]
        )
        for index in layers
    }


def in_words(layers: Mapping[int, nn.Module], name: str) -> str:
    """Describe a parameter or constant by its name in a snapshot. A tied one has its first name, of any layer."""
    kind, _, place = name.partition(":")
    index, _, path = place.partition(".")
    layer = layers.get(int(index))
    return f"{kind} {path!r} of {named_layer(layer, int(index)) if layer else f'layer {index}'}"


def needed(layers: Collection[int], parameters: FlatParameters) -> tuple[int, ...]:
    """Return the layers whose states restore a stage of these layers: its own, and those that own tied parameters."""
    return tuple(sorted({*layers, *(layer_of(name) for name, _ in parameters.named())}))


def snapshot_of(
    layers: Collection[int],
    parameters: FlatParameters,
    optimizer: OptimizerState,
    states: Mapping[int, LayerState],
) -> tuple[Parts, dict[str, Any]]:
    """Return the arguments of `snapshot.restore` for a stage of these layers. states: those `needed`, or more.

    Raises ValueError with a message if one is missing, or if their versions differ.
    """
    wanted = needed(layers, parameters)
    if missing := [index for index in wanted if index not in states]:
        raise ValueError(f"the state of layer {missing[0]} is missing")
    versions = sorted({states[index].version for index in wanted})
    if len(versions) != 1:
        raise ValueError(f"the layers' states are of steps {versions[0]} and {versions[-1]}, expected the same step")
    own = {name for name, _ in (*parameters.named(), *optimizer.named())} | optimizer.scalars().keys()
    possible = optimizer.prefixes()

    def belongs(index: int, name: str) -> bool:
        return index in layers or name in own or name.startswith(possible)

    tensors = {n: t for index, n, t in _all(wanted, states) if belongs(index, n)}
    scalars = {n: v for index in wanted for n, v in states[index].scalars.items() if belongs(index, n)}
    meta = {"format": SNAPSHOT_FORMAT, "version": versions[0], "names": list(tensors), "scalars": scalars}
    return tuple(tensors.values()), meta


def _all(wanted: Collection[int], states: Mapping[int, LayerState]) -> Iterator[tuple[int, str, Tensor]]:
    for index in wanted:
        for name, tensor in states[index].tensors.items():
            if not name.startswith(f"{VALUE}:"):
                yield index, name, tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
