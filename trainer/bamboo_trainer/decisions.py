"""Decisions that change a training while it runs (`Task.decisions`): learning rate, freezing, early stopping.

A decision is a pure function of the last committed step and its own memory; docs/models.md introduces them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Number = int | float | bool | None
Memory = Mapping[str, Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The facts that a decision may use: results of the last committed step.

    step: the number of committed steps, including that one; nothing else is known before the first step, or if a state
    without decisions was restored. loss, gradient_norm (before clipping), metrics: of that step. evaluation: of the
    state after `step - 1` steps, if evaluated. None: not finite. skipped: the step left the model unchanged.
    """

    step: int
    loss: float | None = None
    gradient_norm: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    skipped: bool = False

    def value(self, name: str) -> float | None:
        """Return a number by name: "loss", "gradient_norm", a metric's, or "evaluation/NAME"; None if there is none."""
        if name == "loss":
            return self.loss
        if name == "gradient_norm":
            return self.gradient_norm
        evaluated = name.removeprefix("evaluation/")
        return self.metrics.get(name) if evaluated == name else self.evaluation.get(evaluated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The settings of the next step. Several decisions combine: their rates are multiplied, and a parameter that any of
    them freezes is frozen.

    learning_rate: a factor of `Task.learning_rate`; finite and not negative. frozen: parameters that stay unchanged and
    do not count in the gradient's norm, named "<layer index>.<parameter name>", or patterns such as "0.*"; tied ones by
    their group's first name. stop: training ends with the current state. memory: passed to the decision the next time;
    up to 64 finite numbers or None, by name.
    """

    learning_rate: float = 1.0
    frozen: Sequence[str] = ()
    stop: bool = False
    memory: Memory = field(default_factory=dict)


Decide = Callable[[Committed, Memory], Decision]


def reduce_on_plateau(
    metric: str = "loss",
    *,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    largest: bool = False,
    least: float = 0.0,
) -> Decide:
    """Return a decision that reduces the learning rate when a number does not improve, like torch's ReduceLROnPlateau.

    metric: the name of a positive number (`Committed.value`). factor: multiplies the rate at each reduction. patience:
    how often in a row the number may fail to improve. threshold: only a larger relative change counts as an
    improvement. largest: larger is better. least: the smallest factor of the task's rate.
    """

    def decide(done: Committed, memory: Memory) -> Decision:
        rate, best, bad = memory.get("rate"), memory.get("best"), memory.get("bad") or 0
        rate = 1.0 if rate is None else float(rate)
        value = done.value(metric)
        if value is not None:
            better = best is None or (value > best * (1 + threshold) if largest else value < best * (1 - threshold))
            best, bad = (value, 0) if better else (best, bad + 1)
            if bad > patience:
                rate, bad = max(rate * factor, least), 0
        return Decision(learning_rate=rate, memory={"rate": rate, "best": best, "bad": bad})

    return decide


def frozen_for(steps: int, *parameters: str) -> Decide:
    """Return a decision that freezes parameters for the first `steps` steps. parameters: see `Decision.frozen`."""
    return lambda done, memory: Decision(frozen=parameters if done.step < steps else ())


def stop_when(metric: str = "loss", *, below: float | None = None, above: float | None = None) -> Decide:
    """Return a decision to end training once `Committed.value(metric)` is below `below` or above `above`; give one."""
    if (below is None) == (above is None):
        raise ValueError("stop_when: expected below or above")

    def decide(done: Committed, memory: Memory) -> Decision:
        value = done.value(metric)
        low = value is not None and below is not None and value < below
        high = value is not None and above is not None and value > above
        return Decision(stop=low or high)

    return decide
