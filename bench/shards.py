"""What a step takes with the optimizer's state in shards (`topology.shardOptimizer`), beside the same job without.

    python bench/shards.py
    python bench/shards.py --pipelines 4 --mebibytes 64 --repeat 6

Layers sleep, as if each worker had an accelerator of its own, and each has a parameter whose gradient is summed, sent
and applied; processes and sockets are real. In each round the job runs once with shards and once without, in turns
which one first; a ratio is made of two runs of the same round. Both must give the same losses, to the last bit.
With two pipelines nobody has shards, so that row shows what the measurement is worth.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from _common import Job, Lab, TaskName, lab, machine, main, manifest, median, say, show, write_json
from bamboo_core.job.spec import RedundancyMode

WARMUP, MEASURED = 5, 11
LAYERS = 8
FORWARD_MS = 10.0


def document(pipelines: int, microbatches: int, mebibytes: int, *, shards: bool) -> Any:
    """10 ms a forward and 20 ms a backward of each microbatch, by a model of one stage."""
    steps = WARMUP + MEASURED
    result = manifest(TaskName.EMULATED, 1, microbatches, steps, mode=RedundancyMode.LAZY_FORWARD)
    result["spec"]["topology"] |= {"pipelines": pipelines, "shardOptimizer": shards}
    each = FORWARD_MS / LAYERS
    result["spec"]["task"]["config"] = {
        "layers": LAYERS,
        "forwardMs": each,
        "backwardMs": 2 * each,
        "ballast": (mebibytes << 18) // LAYERS,
    }
    return result


async def once(place: Lab, job: Any) -> tuple[dict[str, float], dict[int, float]]:
    """Milliseconds of the median step, and the cores that others took; and the losses."""
    async with place.watched() as others:
        ran = await Job(place, job, main="_recorder:record").run()
    gaps = [ran.committed[k] - ran.committed[k - 1] for k in range(WARMUP, WARMUP + MEASURED)]
    return {"step": 1e3 * median(gaps), "others": others[0]}, ran.losses


def command(
    pipelines: Annotated[list[int], typer.Option(help="Numbers of pipelines, each a case.")] = [2, 3, 4],  # noqa: B006
    microbatches: Annotated[int, typer.Option(help="Of a step.")] = 24,
    mebibytes: Annotated[int, typer.Option(help="Of the model's parameters, in fp32.")] = 16,
    repeat: Annotated[int, typer.Option(help="Rounds.")] = 4,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """What a step takes with the optimizer's state in shards, beside the same job without."""

    async def body() -> None:
        found: dict[int, list[dict[str, dict[str, float]]]] = {count: [] for count in pipelines}
        async with lab() as place:
            for number in range(repeat):
                for count in pipelines:
                    found[count].append(await pair(place, count, microbatches, mebibytes, first=bool(number % 2)))
        if str(output) != "-":
            report(found, microbatches, mebibytes)
        write_json(output, {"machine": machine(), "found": {str(count): rounds for count, rounds in found.items()}})

    main(body())


async def pair(
    place: Lab, pipelines: int, microbatches: int, mebibytes: int, *, first: bool
) -> dict[str, dict[str, float]]:
    """first: whether the one with shards is."""
    facts, losses = {}, {}
    for shards in (first, not first):
        name = "with" if shards else "without"
        facts[name], losses[name] = await once(place, document(pipelines, microbatches, mebibytes, shards=shards))
    if losses["with"] != losses["without"]:
        raise RuntimeError(f"{pipelines} pipelines: with shards the losses were others")
    told = ", ".join(f"{name} {fact['step']:.0f} ms (others {fact['others']:.2f})" for name, fact in facts.items())
    say(f"{pipelines} pipelines: {told}")
    return facts


def report(found: dict[int, list[dict[str, dict[str, float]]]], microbatches: int, mebibytes: int) -> None:
    rows = []
    for count, rounds in found.items():
        ratios = sorted(facts["with"]["step"] / facts["without"]["step"] for facts in rounds)
        others = [fact["others"] for facts in rounds for fact in facts.values()]
        rows.append(
            [
                str(count),
                *(f"{median([facts[name]['step'] for facts in rounds]):.0f}" for name in ("without", "with")),
                f"{median(ratios):.3f}",
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                f"{min(others):.2f} to {max(others):.2f}",
            ]
        )
    columns = ["pipelines", "step without, ms", "with", "ratio", "min to max", "cores others took"]
    title = f"{microbatches} microbatches, {mebibytes} MiB of parameters; {len(next(iter(found.values())))} rounds"
    show(title, columns, rows)


if __name__ == "__main__":
    typer.run(command)
