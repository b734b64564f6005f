"""Layers compiled by torch.compile, each separately: the required toolchain, and compiling ahead of time.

A compiled layer's code must not depend on the model's split, and its results must not depend on a worker's earlier
calls. So torch compiles each layer as one graph for the exact shapes and dtypes of its inputs (no dynamic shapes),
always with its backward. Evaluations run eagerly, and so do layers that `_left` exempts; a job fails if another layer
cannot be compiled so. Workers compare everything that decides the generated code (`bamboo_core.control.platform`).
"""

import functools
import logging
import os
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from bamboo_core.job.training_spec import TrainingSpec
from bamboo_trainer.split.layers import SplitLayer
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection import Walk, first_batch, forward, look_without_data
from bamboo_trainer.tasks.mixed_precision import rounded
from bamboo_trainer.tasks.running_buffers import running_norms
from bamboo_trainer.tasks.task_errors import TaskError, describe
from bamboo_trainer.tasks.user_code import arguments, named_layer
from bamboo_trainer.training import TrainingConfig

SECONDS: Final = 60.0  # limit for a compiler to print its version


class CompilerUnavailable(ValueError):
    """Error because a job asks for compiled layers and this image lacks a requirement. The message names the field."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compilers that torch.compile needs: C++, and Triton for a GPU."""

    version: str  # the compilers' versions, "" if a requirement is missing
    lacks: str = ""  # the missing requirement, in words


@functools.cache
def toolchain(*, gpu: bool) -> Toolchain:
    """Return the versions of this machine's compilers, or the first requirement that it lacks. gpu: require Triton."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return Toolchain("", f"Python's headers (Python.h in {sysconfig.get_path('include')})")
    compiler = os.environ.get("CXX") or "g++"
    try:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return Toolchain("", f"a C++ compiler ({compiler})")
    named = output.stdout.partition("\n")[0].strip()
    if not gpu:
        return Toolchain(named)
    try:
        return Toolchain(f"{named}, Triton {version('triton')}")
    except PackageNotFoundError:
        return Toolchain("", "the package triton")


def require_toolchain(training: TrainingSpec, *, gpu: bool) -> None:
    """Raise CompilerUnavailable if the job asks for compiled layers and this image lacks a requirement."""
    if training.compile and (lacks := toolchain(gpu=gpu).lacks):
        raise CompilerUnavailable(
            f"spec.training.compile: torch.compile needs {lacks}, which is not here; docs/images.md says how an image "
            "gets it"
        )


class InputForm(NamedTuple):
    """The shape and dtype of a layer's input, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: str  # torch's name
    needs: bool  # whether a gradient is computed for it

    def zeros(self, device: torch.device) -> Tensor:
        made = torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device)
        return made.requires_grad_(self.needs)


def input_forms(task: Task, config: TrainingConfig, end: int) -> dict[int, tuple[InputForm, ...]]:
    """Return the forms of each layer's inputs, by layer before `end`, up to the first layer that needs data to run."""

    def outputs(walk: Walk, index: int, inputs: Parts) -> tuple[tuple[InputForm, ...], Parts]:
        layer = rounded(walk.layer(index), config.parameter_dtype)
        with walk.within:
            parts = forward(task, config, index, layer, inputs)
        return _forms(parts), parts

    inputs, _ = first_batch(task, config.micro_batch_size)
    seen, _ = look_without_data(task, inputs, outputs, range(end - 1))
    return dict(enumerate([_forms(inputs), *seen]))


def _forms(parts: Parts) -> tuple[InputForm, ...]:
    return tuple(InputForm(tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad) for p in parts)


logger = logging.getLogger(__name__)

MOST_FORMS: Final = 8  # of a layer's inputs: each has its own code, searched in each call
_ALL_LAYERS: Final = 1 << 20  # limit for codes of all layers of one class in a process


class CompiledLayers:
    """The compiled layers of a stage, which draw the same random numbers as without compilation.

    deterministic: torch chooses no kernels by benchmarks. left: the layers that are not compiled, with the reason.
    """

    def __init__(self, layers: Mapping[int, nn.Module], *, deterministic: bool) -> None:
        import torch._dynamo  # slow to import, but a worker has imported it
        import torch._functorch

        torch._dynamo.config.accumulated_recompile_limit = _ALL_LAYERS
        torch._functorch.config.donated_buffer = False  # a backward whose weight gradients follow keeps the graph
        torch._functorch.config.force_non_lazy_backward_lowering = True  # together with the forward's code
        compile_layer: Callable[..., Any] = torch.compile  # its declared overloads lack two arguments
        self._layers = layers
        self.left = {index: why for index, layer in layers.items() if (why := _left(layer))}
        self._compiled: dict[int, Callable[..., Any]] = {
            index: compile_layer(
                layer,
                fullgraph=True,
                dynamic=False,
                options={"fallback_random": True, "deterministic": deterministic},
                recompile_limit=MOST_FORMS,
                isolate_recompiles=True,
            )
            for index, layer in layers.items()
            if index not in self.left
        }
        self.seconds = 0.0  # of compiling ahead

    def call(self, index: int, given: Any) -> Any:
        """Run a layer like `call_layer`, compiled unless it is in `left`. Raises TaskError if it cannot be compiled."""
        layer = self._layers[index]
        compiled = self._compiled.get(index, layer)
        try:
            return compiled(*arguments(layer, given))
        except Exception as error:
            if (problem := _problem(error)) is None:
                raise
            raise TaskError(
                f"{named_layer(layer, index)} cannot be compiled (spec.training.compile): {problem}; "
                "torch.compiler.disable around its forward leaves it as it is"
            ) from error

    def compile_ahead(
        self, forms: Mapping[int, tuple[InputForm, ...]], device: torch.device, call: Callable[..., Any]
    ) -> None:
        """Compile layers and their backwards ahead, by forwards on zeros of these forms. call: runs (layer, inputs).

        A layer that raises for zeros is compiled in its first forward. Raises TaskError if one cannot be compiled.
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
                    "layer %d is compiled in its first forward, since with zeros it raises %s", index, describe(error)
                )
        self.seconds = time.perf_counter() - begun
        named = f"layers {min(self._layers)} to {max(self._layers)}"
        logger.info("%s are compiled, in %.1f s", named, self.seconds)
        for index, why in self.left.items():
            logger.info("%s is not compiled, since %s", named_layer(self._layers[index], index), why)


def _left(layer: nn.Module) -> str:
    """Return the reason not to compile a layer; "" to compile it. The answer is the same on all workers."""
    if getattr(layer.forward, "_torchdynamo_disable", False):
        return "its forward is marked with torch.compiler.disable"
    if isinstance(layer, SplitLayer) and layer.has_own_code:
        return "it runs the model's own code in addition to its blocks"
    if norms := running_norms(layer):
        return f"{type(norms[0].module).__name__} in it updates buffers"
    return ""


def _problem(error: Exception) -> str | None:
    """Describe an error of torch.compile itself; None for other errors."""
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

    if isinstance(error, FailOnRecompileLimitHit):
        return f"its inputs have more than {MOST_FORMS} forms, each of which needs its own code"
    if isinstance(error, TorchDynamoException | BackendCompilerFailed):
        return describe(error)
    return None
