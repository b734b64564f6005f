"""Training settings: hyperparameters that workers need in addition to the task, and facts for `build`."""

import math
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Self

import torch

from bamboo_core.job.spec import JobSpec
from bamboo_core.job.training_spec import EvaluationSpec, TrainingSpec
from bamboo_trainer.data.order import sample_numbers
from bamboo_trainer.task import Task, TrainingFacts
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import dataset_length, length_of, tokens_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of a job's training that affect its numerical results.

    microbatches: number per step, over all pipelines. deterministic: require and check that repeated work gives the
    same bits. early: the settings of evaluations that may end the job (early stopping); None if none may. compile:
    compile the layers with torch.compile, apart from exempted ones (`CompiledLayers`).
    """

    seed: int
    precision: str  # "fp32" | "bf16" | "fp16"; of products
    max_gradient_norm: float | None
    microbatches: int
    micro_batch_size: int
    deterministic: bool = True
    parameter_precision: str = "fp32"  # | "bf16"
    boundary_precision: str = "fp32"  # | "bf16"; of what layers pass on
    early: EvaluationSpec | None = None
    compile: bool = False

    @classmethod
    def of(cls, training: TrainingSpec) -> Self:
        """Return the configuration for a manifest's `training` section."""
        return cls(
            seed=training.seed,
            precision=training.precision.value,
            max_gradient_norm=training.max_gradient_norm,
            microbatches=training.microbatches,
            micro_batch_size=training.micro_batch_size,
            deterministic=training.deterministic,
            parameter_precision=training.parameter_precision.value,
            boundary_precision=training.boundary_precision.value,
            early=training.evaluation if training.evaluation and training.evaluation.patience else None,
            compile=training.compile,
        )

    @property
    def scales_losses(self) -> bool:
        """Whether losses are scaled before their gradients are computed."""
        return self.precision == "fp16"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The type of trained and frozen parameters, except norms' (fp32); gradients are summed in fp32."""
        return torch.bfloat16 if self.parameter_precision == "bf16" else torch.float32

    @property
    def boundary_dtype(self) -> torch.dtype:
        """The type to which `mixed_precision.passed_on` rounds tensors between layers."""
        return torch.bfloat16 if self.boundary_precision == "bf16" else torch.float32

    @property
    def global_batch(self) -> int:
        return self.microbatches * self.micro_batch_size

    def samples(self, step: int, microbatch: int, dataset: Sized) -> tuple[int, ...]:
        """Return the sample numbers of a microbatch. Raises TaskError if the dataset is empty, or its `len` fails."""
        size = self.micro_batch_size
        first = step * self.global_batch + microbatch * size
        return sample_numbers(self.seed, first, size, length_of(dataset))


def loss_unit(task: Task, config: TrainingConfig) -> float:
    """Return the divisor of summed losses (over tokens or samples) before loss scaling; 1 without loss scaling.

    It is an estimate of the weight of a whole step, rounded up to a power of two. It brings sums to about the size of
    means, so the same scales suit both.
    """
    if not config.scales_losses:
        return 1.0
    return 2.0 ** math.ceil(math.log2(config.global_batch * (tokens_of(task) or 1)))


def shown_to_build(training: TrainingSpec) -> TrainingFacts:
    """Return the training settings that a task's `build` gets."""
    return TrainingFacts(
        steps=training.known_steps,
        epochs=training.epochs,
        tokens=training.tokens,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        seed=training.seed,
        precision=training.precision.value,
        parameter_precision=training.parameter_precision.value,
    )


def with_steps(spec: JobSpec, task: Task) -> JobSpec:
    """Return the job with its number of steps, computed from epochs or tokens and the task's data if needed. Raises
    TaskError for an invalid dataset or tokens_per_sample, or if the number of steps cannot be computed.
    """
    tokens = task.tokens_per_sample
    if tokens is None:
        tokens = getattr(task.dataset, "tokens_per_sample", None)
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise TaskError(f"task.tokens_per_sample must be an integer of at least 1, got {tokens!r}")
    try:
        return replace(spec, training=spec.training.with_data(dataset_length(task), tokens))
    except TaskError:
        raise
    except ValueError as error:
        raise TaskError(str(error)) from error
