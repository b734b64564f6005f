"""The layers of a stage, each compiled by itself, so that the code of one does not depend on where a model is split.

A compiled layer's bits must not depend on what a worker has run before. So each is one graph, for exactly the shapes
and types that it is given (nothing is guessed to vary), always with the graph that a backward needs, and there is no
way back to the layer as it is: whatever cannot be compiled so ends the job by name. What decides which code is made is
compared among workers (`bamboo_core.control.platform`).
"""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from bamboo_trainer.compilation.cut_backwards import CuttingBackend, mark_cut
from bamboo_trainer.compilation.forms import InputForm
from bamboo_trainer.split.layers import SplitLayer
from bamboo_trainer.tasks.running_buffers import running_modules
from bamboo_trainer.tasks.task_errors import TaskError, told
from bamboo_trainer.tasks.user_code import arguments, named_layer

logger = logging.getLogger(__name__)

MOST_FORMS: Final = 8  # of a layer's inputs: code is made for each, and looked through in each call
_ALL_LAYERS: Final = 1 << 20  # codes of all layers of one class, in a process's life


class CompiledLayers:
    """The compiled layers, by number. left: those that run as they are, and why.

    deterministic: kernels are chosen by no measurement. Random numbers are those that the layers would draw anyway.
    """

    def __init__(self, layers: Mapping[int, nn.Module], *, deterministic: bool) -> None:
        import torch._dynamo  # takes a second, and a worker has it
        import torch._functorch

        torch._dynamo.config.accumulated_recompile_limit = _ALL_LAYERS
        torch._functorch.config.donated_buffer = False  # a backward in two parts comes by twice
        compile_layer: Callable[..., Any] = torch.compile  # its declared forms lack two arguments
        self._layers = layers
        self.left = {index: why for index, layer in layers.items() if (why := _left(layer))}
        backend = CuttingBackend({"fallback_random": True, "deterministic": deterministic})
        self._whole: dict[int, str] = {}  # layers whose backward cannot be cut, and why
        self._compiled: dict[int, Callable[..., Any]] = {
            index: compile_layer(
                layer,
                fullgraph=True,
                dynamic=False,
                backend=backend.of_layer(partial(self._stays_whole, index)),
                recompile_limit=MOST_FORMS,
                isolate_recompiles=True,
            )
            for index, layer in layers.items()
            if index not in self.left
        }
        self.seconds = 0.0  # that were spent to compile ahead

    def call(self, index: int, given: Any) -> Any:
        """The outputs of a layer, as by `call_layer`. Raises TaskError for a layer that cannot be compiled."""
        layer = self._layers[index]
        compiled = self._compiled.get(index, layer)
        try:
            outputs = compiled(*arguments(layer, given))
        except Exception as error:
            if (problem := _problem(error)) is None:
                raise
            raise TaskError(
                f"{named_layer(layer, index)} cannot be compiled (spec.training.compile): {problem}; "
                "torch.compiler.disable around its forward leaves it as it is"
            ) from error
        if index not in self.left and index not in self._whole:
            mark_cut(outputs)
        return outputs

    def _stays_whole(self, index: int, why: str) -> None:
        self._whole[index] = why
        logger.info("the backward of %s stays whole, since %s", named_layer(self._layers[index], index), why)

    def compile_ahead(
        self, forms: Mapping[int, tuple[InputForm, ...]], device: torch.device, call: Callable[..., Any]
    ) -> None:
        """Compiles layers before they are needed, with zeros of these forms. call: (layer, inputs), as in a forward.

        Code for the backward is made with that of the forward. A layer that cannot take zeros is compiled later.
        """
        begun = time.perf_counter()
        for index in self._compiled.keys() & forms.keys():
            given = tuple(form.zeros(device) for form in forms[index])
            try:
                with torch.enable_grad():
                    call(index, given[0] if len(given) == 1 else given)
            except TaskError:
                raise
            except Exception as error:
                logger.info(
                    "layer %d is compiled in its first forward, since with zeros it raises %s", index, told(error)
                )
        self.seconds = time.perf_counter() - begun
        named = f"layers {min(self._layers)} to {max(self._layers)}"
        logger.info("%s are compiled, in %.1f s", named, self.seconds)
        for index, why in self.left.items():
            logger.info("%s is not compiled, since %s", named_layer(self._layers[index], index), why)


def _left(layer: nn.Module) -> str:
    """Why a layer is not to be compiled; "" if it is. By nothing that could be another on another worker."""
    if getattr(layer.forward, "_torchdynamo_disable", False):
        return "its forward is marked with torch.compiler.disable"
    if isinstance(layer, SplitLayer) and layer.has_own_code:
        return "it runs the model's own code beside its blocks"
    if running := running_modules(layer):
        return f"{type(running[0].module).__name__} in it updates buffers"
    return ""


def _problem(error: Exception) -> str | None:
    """A sentence on an error of torch.compile itself; None for other errors."""
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

    if isinstance(error, FailOnRecompileLimitHit):
        return f"it is given inputs of more than {MOST_FORMS} forms, and code is made for each"
    if isinstance(error, TorchDynamoException | BackendCompilerFailed):
        return told(error)
    return None
