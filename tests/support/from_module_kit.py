"""Plain torch modules, and comparisons of modules split into layers with the originals."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import plain_models
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, run_layer


def squared_error(outputs: Parts, targets: Parts) -> Tensor:
    return nn.functional.mse_loss(outputs[0], targets[0])


def small() -> dict[str, Any]:
    data = TensorDataset((torch.rand(8, 4),), (torch.rand(8, 4),))
    return {"dataset": data, "loss": squared_error, "optimizer": plain_models.optimizer, "learning_rate": 0.1}


def model_of(forward: Callable[[Any, Tensor], Any], block: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> Any:
    """Return a module class with a norm, a list of three blocks and the given forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.blocks = nn.LayerNorm(4), nn.ModuleList(block() for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Model


class Cache:
    """A cache of a type that splitting does not know."""


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return self.linear(x) + (0 if isinstance(other, Cache) else other)


def layers_of(task: Task) -> list[nn.Module]:
    layers = [build_layer(task, 0, n) for n in range(len(task.layers))]
    tie(dict(enumerate(layers)), tied_groups(task), task, 0)
    return layers


def state_of(layers: list[nn.Module]) -> dict[str, Tensor]:
    """Return the layers' state under the parameter names of the module that was split into them."""
    return {k.removeprefix("module."): t for layer in layers for k, t in layer.state_dict().items()}


def load_state(layers: list[nn.Module], state: Mapping[str, Tensor]) -> None:
    """Load a job's weights, by names such as "layers.0.bias", into the layers, and set the layers to eval mode."""
    for number, layer in enumerate(layers):
        prefix = f"layers.{number}."
        layer.load_state_dict({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})
        layer.eval()


def check_gradients(layers: list[nn.Module], model: nn.Module) -> None:
    """Check that the layers' gradients are close to the model's. Skip parameters of the model without a gradient."""
    ours = {k.removeprefix("module."): p.grad for layer in layers for k, p in layer.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad)


def whole(task: Task, make: Callable[[], nn.Module]) -> tuple[list[nn.Module], nn.Module]:
    """Return the task's layers, and the unsplit model with the layers' state."""
    layers, model = layers_of(task), make()
    model.load_state_dict(state_of(layers))
    return layers, model


def run(layers: list[nn.Module], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    passed: Any = inputs
    for number, layer in enumerate(layers):
        passed = run_layer(layer, number, passed, lambda given, layer=layer: call_layer(layer, given))
    return tuple(passed)
