"""What goes from layer to layer of a split model beside what its own forward passes on."""

from typing import Protocol

from torch import nn

from bamboo_trainer.task import Parts


class Alongside(Protocol):
    """A sum over the blocks, say. It is begun with the model's inputs and ended behind the last layer. watched: of
    a block's modules those whose outputs it wants to see.
    """

    size: int  # how many tensors go along

    def begin(self, inputs: Parts) -> Parts: ...

    def watched(self, block: nn.Module) -> list[nn.Module]: ...

    def after(self, seen: list[tuple[nn.Module, object]], parts: Parts) -> Parts:
        """What goes along after a block. seen: watched modules of a block with what they returned, in the order of
        their calls.
        """

    def end(self, parts: Parts) -> None: ...


class Seen:
    """What watched modules return while a block is run in it."""

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
