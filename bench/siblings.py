"""Pipelines of one stage: what the loss of one of D workers costs, as all others share its microbatches.

    python bench/siblings.py
    python bench/siblings.py --pipelines 4 --groups 64 --microbatches 64

Layers sleep, as if each worker had an accelerator of its own; processes and sockets are real. A worker is killed at a
random moment of a step, again and again, each time after the job has healed with the one that stands by. Shared evenly,
the step takes at most 1 + 1/(D-1) times as long as a calm one, beside what it takes to see the loss.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from _common import TaskName, lab, machine, main, manifest, median, show, write_json
from _disturb import disturb
from bamboo_core.job.spec import RedundancyMode

MANY = 1_000_000


def document(pipelines: int, microbatches: int, groups: int) -> Any:
    """10 ms a forward and 20 ms a backward of each microbatch."""
    result = manifest(TaskName.EMULATED, 1, microbatches, MANY, mode=RedundancyMode.LAZY_FORWARD, standby=1)
    result["spec"]["training"]["gradientGroups"] = groups
    result["spec"]["topology"]["pipelines"] = pipelines
    return result


def command(
    pipelines: Annotated[list[int], typer.Option(help="Numbers of pipelines, each a case.")] = [2, 3, 4],  # noqa: B006
    microbatches: Annotated[int, typer.Option(help="Of a step.")] = 24,
    groups: Annotated[int, typer.Option(help="Of microbatches whose gradients are summed by themselves.")] = 24,
    kills: Annotated[int, typer.Option(help="Workers to kill in each case.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """What the loss of one of D workers costs, if each of them holds the whole model."""

    async def body() -> None:
        found = {}
        async with lab() as place:
            for count in pipelines:
                job = document(count, microbatches, groups)
                found[count] = await disturb(place, job, kills, notice=False, exits=True, seed=seed)
        rows = []
        for count, result in found.items():
            taken = result["takeovers"]
            ratios = sorted(row["ratio"] for row in taken)
            calm = f"{median([row['calm'] for row in taken]):.0f}"
            rows.append(
                [
                    str(count),
                    calm,
                    f"{median(ratios):.2f}",
                    f"{ratios[-1]:.2f}",
                    f"{1 + 1 / (count - 1):.2f}",
                    f"{median([row['next_ratio'] for row in taken]):.2f}",
                    f"{result['others']:.2f}",
                ]
            )
        columns = [
            "pipelines",
            "calm step, ms",
            "affected / that",
            "max",
            "1 + 1/(D-1)",
            "next / calm",
            "cores others took",
        ]
        if str(output) != "-":
            show(f"{microbatches} microbatches in {groups} groups; {kills} kills in each case", columns, rows)
        write_json(output, {"machine": machine(), "found": {str(k): v for k, v in found.items()}})

    main(body())


if __name__ == "__main__":
    typer.run(command)
