"""How a job trains: frozen values of the manifest's `training`; see `bamboo.job.spec`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

UNKNOWN_STEPS = 2**31  # more than any job has
MOST_SKIPS, MOST_SCALE_POWER = 1000, 32  # skips: in a row
DEFAULT_GROUPS = 16  # of gradients, at most; each doubling takes one more buffer of the size of a stage's gradient


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class ParameterPrecision(StrEnum):
    """The number format of parameters and of what is remembered of them, of what layers pass on, of final gradients."""

    FP32 = "fp32"
    BF16 = "bf16"


class Goal(StrEnum):
    """Which values of a metric are better: small or large ones."""

    MIN = "Min"
    MAX = "Max"


class NonFinite(StrEnum):
    """What becomes of a step whose loss or gradient is not finite. Skip: the model stays as it was before it."""

    FAIL = "Fail"
    SKIP = "Skip"


class Unit(StrEnum):
    """In what the length of a training is counted."""

    STEPS = "steps"
    SAMPLES = "samples"
    TOKENS = "tokens"
    EPOCHS = "epochs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """How long a job trains."""

    unit: Unit
    amount: int

    def __str__(self) -> str:
        return f"{self.amount} {self.unit if self.amount > 1 else self.unit[:-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """every_steps: from one to the next; the last state is evaluated, too. batches: at most; None: all data.

    metric: decides which state is the best. patience: the job ends with the state that was so many times not better;
    None: never. min_delta: by so much at least one has to be better.
    """

    every_steps: int
    batches: int | None = None
    metric: str = "loss"
    goal: Goal = Goal.MIN
    patience: int | None = None
    min_delta: float = 0.0


class LoggerType(StrEnum):
    """Who writes the job's history to another system."""

    TENSORBOARD = "TensorBoard"
    WEIGHTS_AND_BIASES = "WeightsAndBiases"
    MLFLOW = "MLflow"
    CUSTOM = "Custom"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerSpec:
    """entrypoint: "module:function" of a Custom one, which makes what makes it. config: the function's arguments."""

    name: str
    type: LoggerType
    entrypoint: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleSpec:
    """Of the losses in fp16. initial_power: the first scale is 2 to that power.

    growth_interval: it doubles after so many steps with finite gradients, and halves after one without.
    """

    initial_power: int = 16
    growth_interval: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Batch sizes are in samples; the global batch is a multiple of the microbatch.

    steps: UNKNOWN_STEPS as long as only the task's data could tell (`with_data`). until: what the user has said.
    non_finite: what becomes of a step whose loss or gradient is not. max_consecutive_skips: at most so many in a row.
    ema: the decay of averages of the weights; None: none. reproducible: gradients are summed in an order that does not
    depend on the number of pipelines: `gradient_groups` runs of microbatches, whole ones in each pipeline; None: up to
    16. deterministic: equal work gives equal bits; else nobody looks, and kernels may be faster. compile: layers are.
    """

    steps: int
    global_batch_size: int
    micro_batch_size: int
    seed: int = 0
    precision: Precision = Precision.FP32
    parameter_precision: ParameterPrecision = ParameterPrecision.FP32
    boundary_precision: ParameterPrecision = ParameterPrecision.FP32
    gradient_precision: ParameterPrecision = ParameterPrecision.FP32
    max_gradient_norm: float | None = None
    non_finite: NonFinite = NonFinite.FAIL
    max_consecutive_skips: int = 10
    evaluation: EvaluationSpec | None = None
    loggers: tuple[LoggerSpec, ...] = ()
    ema: float | None = None
    reproducible: bool = True
    gradient_groups: int | None = None
    until: Until | None = None  # None: `steps` is what was said
    deterministic: bool = True
    loss_scale: LossScaleSpec | None = None  # None: the default one, in fp16
    compile: bool = False

    @property
    def known_steps(self) -> int | None:
        """How many; None if it is not known yet."""
        return None if self.steps == UNKNOWN_STEPS else self.steps

    def with_data(self, samples: int, tokens_per_sample: int | None) -> "TrainingSpec":
        """With the number of steps that it takes on a dataset of so many samples; the last one is whole.

        Raises ValueError if tokens are to be counted and a sample does not say how many it has.
        """
        if self.until is None or self.known_steps is not None:
            return self
        amount = self.until.amount
        if self.until.unit is Unit.EPOCHS:
            return replace(self, steps=_steps(amount * samples, self.global_batch_size))
        if tokens_per_sample is None:
            raise ValueError("training.until counts tokens, but the task does not say its tokens_per_sample")
        return replace(self, steps=_steps(amount, tokens_per_sample * self.global_batch_size))

    @property
    def scaling(self) -> LossScaleSpec | None:
        """Of the losses; None: they are not scaled."""
        return (self.loss_scale or LossScaleSpec()) if self.precision is Precision.FP16 else None

    @property
    def microbatches(self) -> int:
        """Microbatches in one step, over all pipelines."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def groups(self) -> int | None:
        """In how many groups gradients are summed; None: in as many as there are pipelines."""
        if not self.reproducible:
            return None
        size = -(-self.microbatches // DEFAULT_GROUPS)
        return self.gradient_groups or -(-self.microbatches // size)

    @property
    def most_pipelines(self) -> int:
        """Each one has a share of a step."""
        return self.groups or self.microbatches


def _steps(amount: int, per_step: int) -> int:
    return min(-(-amount // per_step), UNKNOWN_STEPS - 1)


def training_steps(until: Until, global_batch_size: int) -> int:
    """As far as that can be told without the data; else UNKNOWN_STEPS."""
    if until.unit is Unit.STEPS:
        return until.amount
    return _steps(until.amount, global_batch_size) if until.unit is Unit.SAMPLES else UNKNOWN_STEPS
