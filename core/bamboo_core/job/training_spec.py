"""The training of a job: frozen values of the manifest's `training`; see `bamboo_core.job.spec`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

from bamboo_core.job.fields import MAX_INT64
from bamboo_core.job.forms import Integer, Number, Tree
from bamboo_core.job.model import ListOf, Mark, Values, completes
from bamboo_core.job.text_patterns import DNS_LABEL, METRIC
from bamboo_core.text import count

UNKNOWN_STEPS = 2**31  # more than any job has
DEFAULT_GROUPS = 64  # of gradients, at most; twice as many take one more buffer of the size of a stage's gradient


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class ParameterPrecision(StrEnum):
    """The number format of parameters and the optimizer's state, or of the tensors between layers."""

    FP32 = "fp32"
    BF16 = "bf16"


class Goal(StrEnum):
    """The better values of a metric. Min: smaller values. Max: larger values."""

    MIN = "Min"
    MAX = "Max"


class NonFinite(StrEnum):
    """The policy for a step whose loss or gradient is not finite. Fail: end the job, but skip overflows of fp16."""

    FAIL = "Fail"
    SKIP = "Skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """The evaluation of a model on other data while it trains. patience: None for no early stop."""

    every_steps: Annotated[int, Integer()]
    """Steps between evaluations. The last state is also evaluated."""
    batches: Annotated[int | None, Integer()] = None
    """The most batches of microBatchSize samples, from the dataset's beginning. By default all."""
    metric: Annotated[str, METRIC] = "loss"
    """The metric that decides which state is the best."""
    goal: Goal = Goal.MIN
    """Which values of the metric are better."""
    patience: Annotated[int | None, Integer()] = None
    """The number of evaluations without a better one after which the job is complete (EarlyStopped)."""


class LoggerType(StrEnum):
    """The loggers that a manifest can name; a task can bring others."""

    TENSORBOARD = "TensorBoard"
    WEIGHTS_AND_BIASES = "WeightsAndBiases"
    MLFLOW = "MLflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerSpec:
    """An external system that receives the job's metrics."""

    name: Annotated[str, DNS_LABEL]
    """The name of the logger, a DNS label, unique in the list."""
    type: LoggerType
    """The system to write to. Its library has to be in the worker's image. Credentials, such as WANDB_API_KEY, come
    from the environment (worker.template).
    """
    config: Annotated[Mapping[str, Any], Tree()] = field(default_factory=dict)
    """Keyword arguments: folder for TensorBoard; project (required) and arguments of wandb.init for WeightsAndBiases;
    experiment (required) and tracking_uri for MLflow.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The length of a job's training, its batch sizes and number formats. steps: UNKNOWN_STEPS until `with_data`
    derives it from the task's data. gradient_groups: None for the default (see `groups`).
    """

    steps: Annotated[int, Integer(), Mark.FOLLOWS, Mark.NO_NUMBERS]
    """Optimizer steps until the job is complete. Or use epochs or tokens."""
    epochs: Annotated[int | None, Integer(1, MAX_INT64), Mark.NO_NUMBERS] = None
    """Instead of steps: passes over the dataset, rounded up to whole steps."""
    tokens: Annotated[int | None, Integer(1, MAX_INT64), Mark.NO_NUMBERS] = None
    """Instead of steps: tokens, rounded up to whole steps. The task has to give the number of tokens in a sample
    (tokens_per_sample).
    """
    global_batch_size: Annotated[int, Integer()]
    """Samples in a step, over all pipelines."""
    micro_batch_size: Annotated[int, Integer()]
    """Samples that travel through a pipeline together."""
    seed: Annotated[int, Integer(0, MAX_INT64)] = 0
    """Determines the order of samples and all random numbers."""
    precision: Precision = Precision.FP32
    """The number format in which layers compute. With fp16 losses are scaled, by 2^16 at first; the scale halves after
    a step with a gradient that is not finite, and doubles after 2000 steps without one.
    """
    parameter_precision: ParameterPrecision = ParameterPrecision.FP32
    """The number format of parameters and the optimizer's state. bf16 takes half the memory, and rounds each update."""
    boundary_precision: ParameterPrecision = ParameterPrecision.FP32
    """The number format of a layer's outputs and their gradients. bf16 halves what stages send to each other, and
    rounds after every layer.
    """
    max_gradient_norm: Annotated[float | None, Number()] = None
    """Gradient clipping: the norm over the whole model to which larger gradients are scaled down. By default off."""
    non_finite: Annotated[NonFinite, Mark.NO_NUMBERS] = NonFinite.FAIL
    """The policy for a step whose loss or gradient is infinite or not a number. Fail: the job ends; only a gradient
    that overflows in fp16 skips its step. Skip: all workers drop its gradients and go on. More than 10 skipped steps in
    a row end the job.
    """
    evaluation: Annotated[EvaluationSpec | None, Mark.NO_NUMBERS] = None
    """Evaluation of the model on other data."""
    loggers: Annotated[tuple[LoggerSpec, ...], ListOf(8), Mark.NO_NUMBERS] = ()
    """Other systems that receive the job's history. They need spec.checkpoint (or `bamboo run --output`)."""
    gradient_groups: Annotated[int | None, Integer(), Mark.NO_NUMBERS] = None
    """The number of groups of consecutive microbatches in which gradients are summed; the bits depend on it. A job
    cannot have more pipelines than groups. A pipeline with n groups needs log2(n) more buffers of the size of a stage's
    gradient. By default one group for each microbatch, at most 64.
    """
    deterministic: Annotated[bool, Mark.NO_NUMBERS] = True
    """True: repeated work gives the same bits, and copies are compared. False: kernels may add in any order, and
    nothing is compared.
    """
    compile: Annotated[bool, Mark.NO_NUMBERS] = False
    """Compile each layer with torch.compile, which gives other bits, and needs a C++ compiler and Python's headers in
    the workers' image.
    """

    @property
    def known_steps(self) -> int | None:
        """Return the number of steps; None if it is not known yet."""
        return None if self.steps == UNKNOWN_STEPS else self.steps

    @property
    def length(self) -> str:
        """Return how long the job trains, in the unit of the manifest, such as "3 epochs"."""
        if self.epochs is not None:
            return count(self.epochs, "epoch")
        return count(self.steps, "step") if self.tokens is None else count(self.tokens, "token")

    @property
    def counts_data(self) -> bool:
        """Return whether the number of steps follows from the dataset, because the manifest gives epochs or tokens."""
        return self.epochs is not None or self.tokens is not None

    def with_data(self, samples: int, tokens_per_sample: int | None) -> "TrainingSpec":
        """Return the spec with the number of steps for a dataset of `samples` samples, rounded up; the same spec if the
        number of steps is known. Raises ValueError if the length is in tokens and `tokens_per_sample` is None.
        """
        if self.known_steps is not None:
            return self
        if self.epochs is not None:
            return replace(self, steps=_steps(self.epochs * samples, self.global_batch_size))
        assert self.tokens is not None
        if tokens_per_sample is None:
            raise ValueError("training.tokens: the task does not say its tokens_per_sample")
        return replace(self, steps=_steps(self.tokens, tokens_per_sample * self.global_batch_size))

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches of a step, over all pipelines."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def groups(self) -> int:
        """Return the number of groups in which gradients are summed, and so the most pipelines: each needs a group."""
        return (
            self.gradient_groups
            if self.gradient_groups is not None
            else (self.microbatches if self.microbatches <= DEFAULT_GROUPS else DEFAULT_GROUPS)
        )


def _steps(amount: int, per_step: int) -> int:
    return min(-(-amount // per_step), UNKNOWN_STEPS - 1)


@completes(TrainingSpec)
def _complete_steps(values: Values) -> None:
    """Set the number of steps to UNKNOWN_STEPS if epochs or tokens are given; `with_data` computes it later."""
    if values["steps"] is None and (values["epochs"] is not None or values["tokens"] is not None):
        values["steps"] = UNKNOWN_STEPS
