"""A measurement of how long training pauses when a worker is taken away, by phase.

    python bench/pause.py                      # real arithmetic
    python bench/pause.py --task emulated      # layers that sleep: 10 ms a forward, 20 ms a backward

Processes and sockets are real; this program runs the coordinator. It kills workers (SIGKILL) or gives them notice one
after the other, at random moments of a step, each after the job has healed. Victims own random cells.

    detect      from SIGKILL until the coordinator knows of the loss
    decide      until it has sent the plan
    reform      until it learns that the cell's new owner has applied the plan
    recompute   until the new owner has repeated the last forward or backward that the lost one had finished
    pause       all of these together
    delay       how much later than usual the affected step is committed

With notice nothing is repeated. The pause is the moved stage's idle time between the last backward of one step and its
first forward of the next, minus the usual idle time.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import Lab, TaskName, lab, machine, main, manifest, quantile, show, write_json
from _disturb import disturb

MANY = 1_000_000  # steps of a job that is stopped once everything is measured
HEIR = ("work", "idle", "tail")
TARGET_KILL, TARGET_NOTICE = 300.0, 100.0  # ms


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOptions:
    task: TaskName
    pipelines: int
    stages: int
    microbatches: int
    standby: int
    kills: int
    notices: int
    seed: int


async def measure(place: Lab, o: PauseOptions) -> dict[str, Any]:
    microbatches = o.pipelines * o.microbatches
    document = manifest(o.task, o.stages, microbatches, MANY, mode="Replicas", standby=o.standby)
    document["spec"]["topology"] |= {"pipelines": o.pipelines, "schedule": "1F1B"}
    if not o.standby:  # the coordinator chooses the stages, so that a step may begin anew on a smaller grid
        del document["spec"]["topology"]["stages"]
        document["spec"]["elastic"] = {"maxWorkers": o.pipelines * o.stages, "stabilizationSeconds": 0}
    found: dict[str, Any] = {}
    if o.kills:
        found["kills"] = await disturb(place, document, o.kills, notice=False, seed=o.seed)
    if o.notices:
        found["notices"] = await disturb(place, document, o.notices, notice=True, seed=o.seed)
    return found


def report(o: PauseOptions, found: dict[str, Any]) -> None:
    names: tuple[str, ...]
    what = f"{o.task}, {o.pipelines} x {o.stages}, {o.microbatches} microbatches, {o.standby} on standby"
    if "kills" in found:
        rows, others = found["kills"]["takeovers"], found["kills"]["others"]
        anew = sum("pause" not in row for row in rows)
        print(f"{what}; {len(rows)} kills, {anew} steps began anew; others took {others:.2f} cores\n")
        names = ("detect", "decide", "reform", "without_recompute", "recompute", "pause", "calm", "affected", "delay")
        table(f"Without notice, ms (target: {TARGET_KILL:.0f} without_recompute)", rows, names)
        table("The heir's time from the plan until its last instruction; then until the commit, ms", rows, HEIR)
        table(
            "Ratios to an undisturbed step, and work repeated", rows, ("ratio", "next_ratio", "forwards", "backwards")
        )
    if "notices" in found:
        rows, others = found["notices"]["takeovers"], found["notices"]["others"]
        print(f"{what}; {len(rows)} notices; others took {others:.2f} cores\n")
        names = ("decide", "until_boundary", "pause", "usual", "step_before", "delay", "calm")
        table(f"With notice, ms (target: {TARGET_NOTICE:.0f} pause)", rows, names)
        table("Ratios to an undisturbed step", rows, ("ratio", "next_ratio"))
        table("What the new owner reported", [r["reported"] for r in rows], ("reform_ms", "recompute_ms", "forwards"))


def table(title: str, rows: Sequence[dict[str, float]], names: Sequence[str]) -> None:
    quantiles = {"min": 0.0, "median": 0.5, "90 %": 0.9, "max": 1.0}
    lines = []
    for name in names:
        values = [row[name] for row in rows if name in row]
        if not values:
            continue  # each step began anew
        digits = 2 if "ratio" in name else 1
        figures = [*(quantile(values, q) for q in quantiles.values()), sum(values) / len(values)]
        lines.append([name, *(f"{figure:.{digits}f}" for figure in figures)])
    show(title, ["", *quantiles, "mean"], lines)


def command(
    task: Annotated[TaskName, typer.Option(help="What to train.")] = TaskName.GPT,
    pipelines: Annotated[int, typer.Option(help="Pipelines.")] = 1,
    stages: Annotated[int, typer.Option(help="Stages of each.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Of each in a step, of 4 samples.")] = 8,
    standby: Annotated[int, typer.Option(help="Workers on standby.")] = 1,
    kills: Annotated[int, typer.Option(help="Workers to kill.")] = 12,
    notices: Annotated[int, typer.Option(help="Workers to give notice.")] = 8,
    seed: Annotated[int, typer.Option(help="Of stages and moments.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """Measure how long training pauses when a worker is taken away."""
    options = PauseOptions(
        task=task,
        pipelines=pipelines,
        stages=stages,
        microbatches=microbatches,
        standby=standby,
        kills=kills,
        notices=notices,
        seed=seed,
    )

    async def body() -> None:
        async with lab() as place:
            found = await measure(place, options)
        if str(output) != "-":
            report(options, found)
        write_json(output, {"machine": machine(), "options": asdict(options), **found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
