"""Plain modules."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, run_layer


def layers_of(task: Task) -> list[nn.Module]:
    layers = [build_layer(task, 0, n) for n in range(len(task.layers))]
    tie(dict(enumerate(layers)), tied_groups(task), task, 0)
    return layers


def whole(task: Task, make: Callable[[], nn.Module]) -> tuple[list[nn.Module], nn.Module]:
    """The layers, and the model in one with their values."""
    layers, model = layers_of(task), make()
    state = {k.removeprefix("module."): t for layer in layers for k, t in layer.state_dict().items()}
    model.load_state_dict(state)
    return layers, model


def run(layers: list[nn.Module], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    passed: Any = inputs
    for number, layer in enumerate(layers):
        passed = run_layer(layer, number, passed, lambda given, layer=layer: call_layer(layer, given))
    return tuple(passed)
