"""Samples per second of Bamboo's engine against torch.distributed.pipelining's 1F1B on the same training.

    python bench/engine.py                        # real arithmetic, 4 and 2 stages
    python bench/engine.py --task emulated        # layers that sleep: shows the schedule
    python bench/engine.py --task emulated --zero-bubble        # also with postponed weight gradients, on both sides
    python bench/engine.py --task emulated --zero-bubble --clip # also with clipping, for which all sides wait

All sides fork their processes from the same server, with one torch thread each, and train the same layers, split alike
(torch's ZBV: into twice as many stages, two per rank), on the same samples with the same optimizer. Bamboo's workers
wait for each other at the end of a step, for the norm of all gradients and the commit; torch's ranks wait for that norm
if they clip. The losses of all steps must agree, and the norms of the first steps (of all with --clip). The sides take
turns, in reverse order in every second round; a ratio compares two runs of one round.
"""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import (
    Job,
    Lab,
    TaskName,
    gaps,
    lab,
    machine,
    main,
    manifest,
    median,
    quantile,
    say,
    show,
    write_json,
)
from _pipelining import TorchSchedule
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.schedule import StageOrder

PLAIN, LAZY, TORCH = "Bamboo, None", "Bamboo, Replicas", "torch 1F1B"
ZERO, TORCH_ZERO = "Bamboo, ZBH1", "torch ZB1P"
TORCH_ZBV = "torch ZBV"
COMPARED = [
    (PLAIN, TORCH),
    (LAZY, PLAIN),
    (LAZY, TORCH),
    (ZERO, TORCH),
    (ZERO, PLAIN),
    (ZERO, TORCH_ZERO),
    (ZERO, TORCH_ZBV),
]
WARMUP = 4  # steps that do not count
MAX_NORM = 0.1  # of clipped gradients; those of both tasks are larger


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a run."""

    ends: list[float]  # of the steps, in seconds: their commits, or for torch at stage 0, which finishes last
    losses: list[float]
    cpu: float  # of all processes, per step
    norms: list[float]  # of the whole gradient, at least of the first steps
    in_flight: float  # the most microbatches whose activations a worker keeps, in units of all its layers

    def facts(self, others: float) -> dict[str, float]:
        ends = self.ends[WARMUP - 1 :]
        mean = (ends[-1] - ends[0]) / (len(ends) - 1)
        facts = {"median": median(gaps(ends)), "mean": mean, "cpu": self.cpu, "others": others}
        return facts | {"in_flight": self.in_flight}

    def difference(self, other: "Result") -> float:
        """Return the largest relative difference to another run's losses and gradient norms."""
        pairs = [*zip(self.losses, other.losses, strict=True), *zip(self.norms, other.norms, strict=False)]
        return max(abs(a - b) / abs(b) for a, b in pairs)


def per_step(times: list[float]) -> float:
    return (times[-1] - times[WARMUP - 1]) / (len(times) - WARMUP)


async def bamboo(place: Lab, document: Any) -> Result:
    job = await Job(place, document, main="_recorder:time_steps").run()
    found = [json.loads(path.read_text()) for path in job.folder.glob("*.record")]
    ends = [[times for _, times in sorted((int(step), times) for step, times in one.items())] for one in found]
    cpu = sum(per_step([cpu for _, cpu in one]) for one in ends)
    spec = parse_manifest(document)
    stages, order = spec.topology.stages, StageOrder.of(spec.topology)
    flying = max(order.in_flight(stage, stages, spec.training.microbatches) for stage in range(stages))
    committed, losses, norms = ([told[k] for k in sorted(told)] for told in (job.committed, job.losses, job.norms))
    return Result(committed, losses, cpu, norms, flying)


async def pipelining(place: Lab, document: Any, *, schedule: TorchSchedule = TorchSchedule.ONE_F_ONE_B) -> Result:
    stages = document["spec"]["topology"]["stages"]
    arguments = {"manifest": document, "folder": str(place.new_folder()), "schedule": str(schedule)}
    ranks = [place.pool.call("_pipelining:run", {**arguments, "rank": rank}) for rank in range(stages)]
    results = await asyncio.gather(*ranks)
    losses = next(r["losses"] for r in results if r["losses"])
    norms = [sum(squares) ** 0.5 for squares in zip(*(r["norms"] for r in results), strict=True)]
    cpu, flying = sum(per_step(r["cpu"]) for r in results), max(r["in_flight"] for r in results)
    return Result(results[0]["ends"], losses, cpu, norms, flying)


async def measure(place: Lab, options: "EngineOptions", task: TaskName, stages: int) -> dict[str, Any]:
    """Measure a task in `repeat` rounds of all sides. Noisy rounds are kept apart and repeated, at most 3 * repeat."""
    sides = _sides(options, task, stages)
    rounds: list[dict[str, Any]] = []
    noisy: list[dict[str, Any]] = []
    difference = 0.0
    while len(rounds) < options.repeat and len(noisy) < 3 * options.repeat:
        results: dict[str, Result] = {}
        facts = {}
        for side in list(sides)[:: -1 if (len(rounds) + len(noisy)) % 2 else 1]:
            run, document = sides[side]
            async with place.watched() as others:
                results[side] = await run(place, document)
            facts[side] = results[side].facts(others[0])
        first = next(iter(results.values()))
        difference = max([difference, *(result.difference(first) for result in results.values())])
        quiet = all(f["others"] <= options.quiet for f in facts.values())
        (rounds if quiet else noisy).append(facts)
        told = ", ".join(f"{side} {1e3 * f['median']:.0f} ms (others {f['others']:.2f})" for side, f in facts.items())
        say(f"{task}, {stages} stages, {len(rounds)}/{options.repeat}{'' if quiet else ', noisy'}: {told}")
    return {
        "task": task,
        "stages": stages,
        "microbatches": options.microbatches,
        "steps": options.steps,
        "clip": options.clip,
        "rounds": rounds,
        "noisy": noisy,
        "largest_difference": difference,
    }


def _sides(options: "EngineOptions", task: TaskName, stages: int) -> dict[str, Any]:
    """Return the function and manifest of each side, by the side's name."""
    steps = WARMUP + options.steps
    plain, lazy, split = (
        manifest(task, stages, options.microbatches, steps, mode=mode) for mode in ("None", "Replicas", "None")
    )
    if options.clip:
        for document in (plain, lazy, split):
            document["spec"]["training"]["maxGradientNorm"] = MAX_NORM
    sides: dict[str, Any] = {PLAIN: (bamboo, plain), TORCH: (pipelining, plain), LAZY: (bamboo, lazy)}
    if options.zero_bubble:
        split["spec"]["topology"]["schedule"] = "ZBH1"
        kinds = {TORCH_ZERO: TorchSchedule.ZB1P, TORCH_ZBV: TorchSchedule.ZBV}
        sides |= {ZERO: (bamboo, split)}
        sides |= {side: (partial(pipelining, schedule=kind), plain) for side, kind in kinds.items()}
    return sides


def ratios(rounds: list[dict[str, Any]], over: str, under: str, figure: str) -> list[float]:
    """Return, for each round, the figure of side `under` divided by that of side `over`. Low figures are better."""
    return [facts[under][figure] / facts[over][figure] for facts in rounds]


def report(case: Any) -> None:
    batch, rounds = 4 * case["microbatches"], case["rounds"] or case["noisy"]
    rows = []
    sides = [side for side in (TORCH, PLAIN, LAZY, TORCH_ZERO, ZERO, TORCH_ZBV) if side in rounds[0]]
    for side in sides:
        step, cpu = median([r[side]["median"] for r in rounds]), median([r[side]["cpu"] for r in rounds])
        taken = median([r[side]["others"] for r in rounds])
        figures = [f"{batch / step:.1f}", f"{1e3 * step:.1f}", f"{1e3 * cpu:.1f}", f"{taken:.2f}"]
        rows.append([side, *figures, f"{rounds[0][side]['in_flight']:.1f}"])
    title = f"{case['task']}, {case['stages']} stages, {case['microbatches']} microbatches of 4 samples"
    print(f"{len(case['rounds'])} rounds, and {len(case['noisy'])} that were too noisy")
    columns = ["samples/s", "median step, ms", "CPU a step, ms", "others, cores", "microbatches kept"]
    show(title, ["", *columns], rows)
    rows = []
    for over, under in [pair for pair in COMPARED if set(pair) <= set(sides)]:
        found = ratios(rounds, over, under, "median")
        others = [f"{median(ratios(rounds, over, under, figure)):.3f}" for figure in ("mean", "cpu")]
        spread = [_range(quantile(found, 0.25), quantile(found, 0.75)), _range(min(found), max(found))]
        rows.append([f"{over} / {under}", f"{median(found):.3f}", *spread, *others])
    columns = ["", "samples/s", "quartiles", "min to max", "by mean step", "by CPU time"]
    show("Ratios, round by round (more than 1: the first is faster)", columns, rows)
    print(f"Losses and gradients' norms differ by at most {case['largest_difference']:.1e} of their value.\n")


def _range(low: float, high: float) -> str:
    return f"{low:.3f} to {high:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    microbatches: int
    steps: int
    repeat: int
    quiet: float
    zero_bubble: bool
    clip: bool


async def bench(
    tasks: list[TaskName], stages: list[int], options: EngineOptions, output: Path | None, tolerance: float
) -> None:
    async with lab() as place:
        cases = [await measure(place, options, task, n) for task in tasks for n in stages]
    if str(output) != "-":
        for case in cases:
            report(case)
    write_json(output, {"machine": machine(), "cases": cases})
    if (worst := max(case["largest_difference"] for case in cases)) > tolerance:
        raise RuntimeError(f"the sides did not do the same work: losses or gradients' norms differ by {worst:.1e}")


def command(
    task: Annotated[list[TaskName], typer.Option(help="What to train; may be given twice.")] = [TaskName.GPT],  # noqa: B006
    stages: Annotated[list[int], typer.Option(help="Numbers of stages, each a case.")] = [4, 2],  # noqa: B006
    microbatches: Annotated[int, typer.Option(help="Microbatches a step, of 4 samples.")] = 8,
    steps: Annotated[int, typer.Option(help="Measured steps of each run.")] = 20,
    repeat: Annotated[int, typer.Option(help="Rounds; in each of them every side runs once.")] = 7,
    quiet: Annotated[float, typer.Option(help="Cores that others may take in a round.")] = 0.2,
    zero_bubble: Annotated[bool, typer.Option(help="ZB-H1 and torch's zero-bubble schedules, too.")] = False,
    clip: Annotated[bool, typer.Option(help="Clip gradients by their norm over all stages, on all sides.")] = False,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference of a loss or a norm.")] = 1e-3,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """Compare the throughput of Bamboo's engine with torch.distributed.pipelining's."""
    options = EngineOptions(
        microbatches=microbatches,
        steps=steps,
        repeat=repeat,
        quiet=quiet,
        zero_bubble=zero_bubble,
        clip=clip,
    )
    main(bench(task, stages, options, output, tolerance))


if __name__ == "__main__":
    typer.run(command)
