"""A measurement of how much replicas lengthen a step while nothing fails.

    python bench/redundancy.py
    python bench/redundancy.py --replicas 1 --replicas 2 --replicas 3 --mebibytes 32

Layers sleep, as if each worker had an accelerator of its own; processes and sockets are real. In each round every
variant runs the same job once, in an order that rotates; a ratio compares two runs of the same round. All runs of a
round must give the same losses, to the last bit. The cost is how much longer the median step takes than with mode None.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from _common import Job, Lab, TaskName, lab, machine, main, manifest, median, say, show, write_json
from bamboo_core.job.spec import RedundancyMode

LAYERS = 4  # of each stage
WARMUP = 5  # steps that do not count, rehearsals included


class Variant(NamedTuple):
    """A redundancy mode and number of replicas, with which the job runs once in each round."""

    mode: RedundancyMode
    replicas: int = 1  # of each stage

    def __str__(self) -> str:
        return f"{self.mode}, {self.replicas} replicas" if self.replicas > 1 else str(self.mode)


OFF = Variant(RedundancyMode.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyOptions:
    steps: int
    repeat: int
    mebibytes: int  # parameters that a stage has in addition, and does not use
    modes: list[Variant]


def document(o: RedundancyOptions, stages: int, variant: Variant) -> Any:
    """Return the manifest of a job whose stages sleep 10 ms per forward and 20 ms per backward."""
    result = manifest(TaskName.EMULATED, stages, 2 * stages, WARMUP + o.steps, mode=variant.mode)
    result["spec"]["redundancy"]["replicas"] = variant.replicas
    result["spec"]["task"]["config"] = {
        "layers": LAYERS * stages,
        "forwardMs": 10 / LAYERS,
        "backwardMs": 20 / LAYERS,
        "ballast": (o.mebibytes << 18) // LAYERS,
    }
    return result


async def once(
    place: Lab, o: RedundancyOptions, stages: int, variant: Variant
) -> tuple[dict[str, Any], dict[int, float]]:
    async with place.watched() as others:
        job = await Job(place, document(o, stages, variant), main="_recorder:record").run()
    gaps = [job.committed[k] - job.committed[k - 1] for k in range(WARMUP, WARMUP + o.steps)]
    facts = {
        "median": 1e3 * median(gaps),
        "mean": 1e3 * sum(gaps) / len(gaps),
        "steps": [1e3 * g for g in gaps],
        "others": others[0],
    }
    return facts, job.losses


async def cost(place: Lab, o: RedundancyOptions, stages: int) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    for number in range(o.repeat):
        facts: dict[str, Any] = {}
        losses = {}
        first = number % len(o.modes)
        for mode in o.modes[first:] + o.modes[:first]:
            facts[str(mode)], losses[mode] = await once(place, o, stages, mode)
        if any(losses[mode] != losses[OFF] for mode in o.modes):
            raise RuntimeError(f"{stages} stages: the modes did not give the same losses")
        rounds.append(facts)
        told = ", ".join(f"{mode} {facts[str(mode)]['median']:.1f} ms" for mode in o.modes)
        say(f"{stages} stages, {number + 1}/{o.repeat}: {told}; others {max(f['others'] for f in facts.values()):.2f}")
    return {"stages": stages, "rounds": rounds}


def costs(rounds: list[dict[str, Any]], mode: str, figure: str) -> list[float]:
    """Return, for each round, by how many percent a mode's figure exceeds that of mode None."""
    return [100 * (facts[mode][figure] / facts[str(OFF)][figure] - 1) for facts in rounds]


def report_cost(o: RedundancyOptions, found: dict[str, Any]) -> None:
    rounds = found["rounds"]
    rows = []
    for mode in map(str, o.modes):
        times, by_mean = costs(rounds, mode, "median"), costs(rounds, mode, "mean")
        rows.append(
            [
                mode,
                f"{median([facts[mode]['median'] for facts in rounds]):.1f}",
                f"{median(times):+.2f}",
                f"{min(times):+.2f} to {max(times):+.2f}",
                f"{median(by_mean):+.2f}",
                f"{median([facts[mode]['others'] for facts in rounds]):.2f}",
            ]
        )
    columns = ["", "step, ms", "cost, %", "min to max", "by mean step", "others' cores"]
    show(f"{found['stages']} stages; {len(rounds)} rounds of {o.steps} steps", columns, rows)


def command(
    stages: Annotated[list[int], typer.Option(help="Numbers of stages, each a case.")] = [4, 8],  # noqa: B006
    replicas: Annotated[list[int], typer.Option(help="Replicas of each stage, beside none.")] = [1],  # noqa: B006
    mebibytes: Annotated[int, typer.Option(help="More parameters of each stage, which nothing uses.")] = 0,
    steps: Annotated[int, typer.Option(help="Measured steps of each run.", min=2)] = 11,
    repeat: Annotated[int, typer.Option(help="Rounds; in each of them every variant runs once.", min=1)] = 3,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """Measure by how much replicas lengthen a step while nothing fails."""
    modes = [OFF, *(Variant(RedundancyMode.REPLICAS, n) for n in replicas)]
    o = RedundancyOptions(steps=steps, repeat=repeat, mebibytes=mebibytes, modes=modes)

    async def body() -> None:
        async with lab() as place:
            found = [await cost(place, o, one) for one in stages]
        if str(output) != "-":
            for result in found:
                report_cost(o, result)
        write_json(output, {"machine": machine(), "options": asdict(o), "cost": found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
