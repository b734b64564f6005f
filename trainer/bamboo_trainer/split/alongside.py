"""Tensors passed from layer to layer of a split model in addition to those of its own forward."""

from typing import Protocol

from torch import nn

from bamboo_trainer.task import Parts


class Alongside(Protocol):
    """Tensors such as a sum over the blocks. They begin with the model's inputs and end behind the last layer.

    watched: returns the modules of a block whose outputs are needed.
    """

    size: int  # the number of tensors

    def begin(self, inputs: Parts) -> Parts: ...

    def watched(self, block: nn.Module) -> list[nn.Module]: ...

    def after(self, seen: list[tuple[nn.Module, object]], parts: Parts) -> Parts:
        """Return the tensors after a block. seen: watched modules of a block with what they returned, in the order of
        their calls.
        """

    def end(self, parts: Parts) -> None: ...


class Seen:
    """Records what watched modules return while a block runs inside this context."""

    def __init__(self, watched: list[nn.Module]) -> None:
        self.outputs: list[tuple[nn.Module, object]] = []
        self._watched = watched

    def __enter__(self) -> "Seen":
        self._hooks = [module.register_forward_hook(self._see) for module in self._watched]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, module: nn.Module, _: object, returned: object) -> None:
        self.outputs.append((module, returned))
