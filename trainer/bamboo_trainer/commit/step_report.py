"""Reports of cells on a finished step, and their combination by the root: loss, norm, scale, metrics.

Sums are sent as a few terms (`exact_terms`), except the losses and weights of microbatches, which are sent one by one.
`math.fsum` of the terms of several sums is the exactly rounded sum of their numbers, if these are finite, however cells
divide them. After Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997 (grow-expansion).
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from bamboo_core.control.protocol import MOST_METRICS
from bamboo_core.planning.plan import Cell
from bamboo_trainer.frames import Commit, Ready
from bamboo_trainer.stage.work import Work


def exact_terms(numbers: Iterable[float]) -> list[float]:
    """Return at most about 40 floats with the numbers' exact sum; if some are not finite, only the first of these."""
    terms: list[float] = []
    for number in numbers:
        if not math.isfinite(number):
            return [number]
        rest, kept = number, []
        for term in terms:
            total = rest + term  # with its rounding error (Knuth)
            of_term = total - rest
            error = (rest - (total - of_term)) + (term - of_term)
            rest = total
            if error:
                kept.append(error)
        terms = [*kept, rest] if rest else kept
    return terms


def exact_sums(
    measured: Iterable[Mapping[str, tuple[float, float]]],
) -> dict[str, tuple[list[float], list[float]]]:
    """Return `exact_terms` of each metric's sum and weight by name. measured: (sum, weight) by name, per microbatch."""
    pairs_by_name: dict[str, list[tuple[float, float]]] = {}
    for one in measured:
        for name, pair in one.items():
            pairs_by_name.setdefault(name, []).append(pair)
    return {
        name: (exact_terms(total for total, _ in pairs), exact_terms(weight for _, weight in pairs))
        for name, pairs in sorted(pairs_by_name.items())
    }


def quotient(total: Sequence[float], weight: Sequence[float]) -> float:
    """Divide two exactly rounded sums, given by their terms; NaN if a term or the result is not finite."""
    if not all(map(math.isfinite, (*total, *weight))):
        return math.nan  # fsum raises if they include infinities of both signs
    try:
        ratio = math.fsum(total) / math.fsum(weight)
    except (OverflowError, ZeroDivisionError):
        return math.nan
    return ratio if math.isfinite(ratio) else math.nan


Sums = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # by name: the terms of a sum, and of its weight


def step_report(cell: Cell, squared_norms: Iterable[float], work: Work) -> Ready:
    """Return a cell's report to the root. squared_norms: the squared norm of each parameter's final gradient."""
    added: dict[str, list[float]] = {}
    for microbatch, values in sorted(work.added_values.items()):
        for name, value in values:
            added.setdefault(name, []).append(value * work.weights.get(microbatch, 1.0))
    return Ready(
        cell=cell,
        squared_norm=exact_terms(squared_norms),
        losses=dict(work.losses),
        weights={m: work.weights[m] for m in work.losses if m in work.weights},
        added={name: exact_terms(values) for name, values in added.items()},
        metrics=exact_sums(work.metrics.values()),
        evaluation=exact_sums(work.evaluated.values()),
    )


def combined(reports: Sequence[Ready], loss_unit: float = 1.0, *, generation: int = 0, epoch: int = 0) -> Commit:
    """Combine the reports of all cells, in any order, into a step's commit. Its numbers are NaN if not finite. For an
    evaluation alone, after the last step, loss and norm are 0. loss_unit: the number by which summed losses were
    divided before their backward.
    """
    losses = [loss for report in reports for loss in report.losses.values()]
    weights = [weight for report in reports for weight in report.weights.values()]
    if weights and len(weights) != len(losses):
        weights = [math.nan]  # a mean in one pipeline and a sum in another
    whole = weights or [float(max(1, len(losses)))]
    added: dict[str, list[float]] = {}
    for name, terms in (pair for report in reports for pair in report.added.items()):
        added.setdefault(name, []).extend(terms)
    squares = [term for report in reports if report.cell.pipeline == 0 for term in report.squared_norm]
    scale = quotient([loss_unit], weights) if weights else 1.0
    metrics = {name: quotient(terms, whole) for name, terms in added.items()}
    metrics |= _quotients([report.metrics for report in reports])
    return Commit(
        loss=quotient([*losses, *(term for terms in added.values() for term in terms)], whole),
        norm=math.sqrt(quotient(squares, [1.0])) * scale,
        scale=scale,
        microbatches=len(losses),
        metrics={name: metrics[name] for name in sorted(metrics)[:MOST_METRICS]},
        evaluation=_quotients([report.evaluation for report in reports]),
        generation=generation,
        epoch=epoch,
    )


def _quotients(reports: Sequence[Sums]) -> dict[str, float]:
    """Return, by name, each metric's sum divided by its weight, both over all cells that measured it."""
    return {
        name: quotient(
            [term for one in reports if name in one for term in one[name][0]],
            [term for one in reports if name in one for term in one[name][1]],
        )
        for name in sorted({name for one in reports for name in one})
    }
