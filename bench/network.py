"""The cost of a network to a job: its rate, its delay, a limit per connection, and the loss of a connection.

    python bench/network.py                       # all questions
    python bench/network.py --only steps,loss --json network.json

Every worker is a process in a network namespace of its own. All packets pass through a process that delays them like a
network (`_switch`), since the kernel's own means (tc netem) are not on every machine. Layers sleep, as if each worker
had an accelerator of its own.

    steps       how much longer a step takes than computed: the schedule in virtual time, with the job's own forwards
                and backwards as measured without a network, and the transfer time of each boundary tensor
    loss        the step in which a connection is lost, beside the others
    sync        the cost of replicas (mode Replicas), and the rate from which they are free
    reduction   the cost of summing gradients over two pipelines, as a whole and in buckets

Needs Linux, iproute2, and root or the right to make namespaces. Changes nothing outside the namespaces.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import Job, Lab, TaskName, chosen_of, gaps, lab, machine, main, manifest, median, say, show, write_json
from _network import CUT, Network, network
from _switch import CONTROL, Shape
from bamboo_core.control.channel_events import Received
from bamboo_core.control.protocol import StepCommitted
from bamboo_core.names import FLOWS_PER_LINK
from bamboo_core.planning.profile import Network as ProfileNetwork
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.steps.pipelines import Group, execute

STAGES, MICROBATCHES, SAMPLES = 2, 8, 4
FORWARD, BACKWARD = 0.010, 0.020
WARMUP = 4  # steps that do not count
GIGABIT = 1e9
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a job sends and computes."""

    boundary: int = 4 << 20  # bytes of a microbatch between two stages
    weights: int = 0  # parameters of each stage, in its layers
    mode: str = "None"
    steps: int = 12
    stages: int = STAGES
    pipelines: int = 1
    layers: int = 2
    backward: float = BACKWARD  # seconds of a microbatch in a stage, twice those of a forward
    buckets: bool | None = None  # True: one per layer; False: one for all; None: by size


MAINS = {None: "time_steps", False: "time_steps_of_one_bucket", True: "time_steps_in_buckets"}


def document_of(load: Load) -> Any:
    made = manifest(TaskName.EMULATED, load.stages, MICROBATCHES, WARMUP + load.steps, mode=load.mode)
    config: dict[str, float] = {
        "layers": load.layers * load.stages,
        "width": load.boundary // 4 // SAMPLES,
        "weights": load.weights // load.layers,
    }
    config |= {"forwardMs": 500 * load.backward / load.layers, "backwardMs": 1e3 * load.backward / load.layers}
    made["spec"]["task"] = {"entrypoint": "_emulated:build_wide", "config": config}
    made["spec"]["topology"] |= {"pipelines": load.pipelines}
    return made


async def steps_of(place: Lab, load: Load, cut: bool = False) -> tuple[list[float], float]:
    """Return the seconds of each counted step, and the cores that others used. cut: lose a connection in the sixth."""
    job = Job(place, document_of(load), main=f"_network:{MAINS[load.buckets]}")
    job.host, mark = CONTROL, job.folder / CUT

    def look(now: float, event: Any, commands: Any) -> None:
        committed = isinstance(event, Received) and isinstance(event.message, StepCommitted)
        if committed and cut and event.message.step == WARMUP + 5:
            mark.touch()

    job.look = look
    async with place.watched() as others:
        await job.run()
    if mark.exists():
        raise RuntimeError("no connection was lost")
    ends = [job.committed[step] for step in sorted(job.committed)]
    return gaps(ends[WARMUP - 1 :]), others[0]


def ideal(load: Load, shape: Shape, calm: float) -> float:
    """Return the computed seconds of a step. calm: of one on a network that costs nothing."""
    fastest = 1e15
    rate = min(shape.rate or fastest, (shape.flow or fastest) * FLOWS_PER_LINK) / 8
    each = calm / (MICROBATCHES + STAGES - 1)
    group = Group(
        forward=(each / 3,) * STAGES,
        backward=(each * 2 / 3,) * STAGES,
        boundary=(load.boundary,) * STAGES,
        owners=(tuple(range(STAGES)),),
        microbatches=(MICROBATCHES,),
        order=StageOrder(),
        network=ProfileNetwork(flow=rate, machine=rate, latency=shape.delay),
        busy=(0.0,) * STAGES,
    )
    return execute(group).end


STEPS = [(rate, delay) for rate in (1.0, 5.0, 10.0) for delay in (0.0, 1.0, 5.0)]


async def steps(place: Lab, net: Network, calm: dict[Load, float]) -> list[Row]:
    """Measure steps on shaped networks; also with a quarter of the rate per connection."""
    rows = []
    shapes = [Shape(rate * GIGABIT, 0.0, delay / 1e3) for rate, delay in STEPS]
    load = Load()
    for shape in [*shapes, Shape(GIGABIT, GIGABIT / 4, 1e-3)]:
        name = f"{shape.rate / GIGABIT:g} Gb/s, {1e3 * shape.delay:g} ms"
        say(f"steps: {name}, {shape.flow / GIGABIT:g} Gb/s a connection")
        base = await calm_step(place, net, load, calm)
        before = net.shape(shape)
        taken, others = await steps_of(place, load)
        after = net.shape(Shape())
        rows.append(
            {
                **asdict(shape),
                "step": median(taken),
                "ideal": ideal(load, shape, base),
                "calm": base,
                "others": others,
                "dropped": after["dropped"] - before["dropped"],
            }
        )
    return rows


async def calm_step(place: Lab, net: Network, load: Load, calm: dict[Load, float]) -> float:
    """Return the seconds of a step with tiny boundary tensors, where only computing counts; measured once."""
    small = replace(load, boundary=4 * 64 * SAMPLES)
    if small not in calm:
        say("a step without a network")
        net.shape(Shape())
        calm[small] = median((await steps_of(place, small))[0])
    return calm[small]


async def loss(place: Lab, net: Network, calm: dict[Load, float]) -> list[Row]:
    rows = []
    for rate, delay in ((1.0, 1.0), (5.0, 1.0), (5.0, 5.0)):
        say(f"loss: {rate:g} Gb/s, {delay:g} ms")
        shape = Shape(rate * GIGABIT, 0.0, delay / 1e3)
        net.shape(shape)
        taken, others = await steps_of(place, Load(), cut=True)
        rows.append({**asdict(shape), "median": median(taken), "longest": max(taken), "steps": taken, "others": others})
    return rows


SYNC = (0.25, 0.5, 1.0, 2.0, 5.0)
WEIGHTS = 4_000_000  # of a stage: 16 MB of gradients per step


async def sync(place: Lab, net: Network, calm: dict[Load, float]) -> list[Row]:
    rows = []
    for rate in SYNC:
        shape = Shape(rate * GIGABIT, 0.0, 1e-3)
        net.shape(shape)
        found = {}
        for mode in ("None", "Replicas"):
            say(f"sync: {rate:g} Gb/s, {mode}")
            found[mode], others = await steps_of(place, Load(boundary=1 << 16, weights=WEIGHTS, mode=mode))
        plain, lazy = median(found["None"]), median(found["Replicas"])
        rows.append(
            {
                **asdict(shape),
                "none": plain,
                "lazy": lazy,
                "transfer": 32 * WEIGHTS / shape.rate,
                "others": others,
            }
        )
    return rows


REDUCTION = [(1, 0.032), (1, 0.064), (2, 0.064)]  # stages, Gb/s
REDUCED = Load(boundary=1 << 16, weights=400_000, pipelines=2, layers=4, backward=0.2)
TURNS = 2  # of all cases, so that other load on the machine affects them alike


async def reduction(place: Lab, net: Network, calm: dict[Load, float]) -> list[Row]:
    rows = []
    for stages, rate in REDUCTION:
        shape, load = Shape(rate * GIGABIT, 0.0, 1e-3), replace(REDUCED, stages=stages)
        net.shape(shape)
        cases = {
            "none": replace(load, weights=0),
            "whole": replace(load, buckets=False),
            "buckets": replace(load, buckets=True),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        taken = 0.0
        for _ in range(TURNS):
            for name, case in cases.items():
                say(f"reduction: {stages} stages, {rate:g} Gb/s, {name}")
                times, others = await steps_of(place, case)
                found[name] += times
                taken = max(taken, others)
        rows.append(
            {
                **asdict(shape),
                **{name: median(times) for name, times in found.items()},
                "stages": stages,
                "backward": load.backward,
                "transfer": 32 * load.weights / shape.rate,
                "others": taken,
            }
        )
    return rows


QUESTIONS = {
    "steps": steps,
    "loss": loss,
    "sync": sync,
    "reduction": reduction,
}


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def gigabits(rate: float) -> str:
    return f"{rate / GIGABIT:g}" if rate else "-"


Table = tuple[str, list[str], Callable[[Row], list[str]]]
TABLES: dict[str, Table] = {
    "steps": (
        "steps: 4 MiB between two stages, 8 microbatches of 30 ms",
        ["Gb/s", "of a connection", "ms", "ms a step", "by arithmetic", "ratio", "cores others took"],
        lambda r: [
            gigabits(r["rate"]),
            gigabits(r["flow"]),
            ms(r["delay"]),
            ms(r["step"]),
            ms(r["ideal"]),
            f"{r['step'] / r['ideal']:.2f}",
            f"{r['others']:.2f}",
        ],
    ),
    "loss": (
        "loss: of one of 4 connections, within a boundary tensor",
        ["Gb/s", "ms", "median ms a step", "longest", "more", "cores others took"],
        lambda r: [
            gigabits(r["rate"]),
            ms(r["delay"]),
            ms(r["median"]),
            ms(r["longest"]),
            ms(r["longest"] - r["median"]),
            f"{r['others']:.2f}",
        ],
    ),
    "sync": (
        "sync: 16 MB of gradients of each stage go to its replica",
        ["Gb/s", "transfer ms", "None, ms a step", "Replicas", "cost", "cores others took"],
        lambda r: [
            gigabits(r["rate"]),
            ms(r["transfer"]),
            ms(r["none"]),
            ms(r["lazy"]),
            f"{r['lazy'] / r['none'] - 1:+.0%}",
            f"{r['others']:.2f}",
        ],
    ),
    "reduction": (
        "reduction: 1.6 MB of gradients of each stage, two pipelines of 4 microbatches; a backward takes 200 ms",
        [
            "stages",
            "Gb/s",
            "transfer ms",
            "no gradients, ms a step",
            "one bucket",
            "buckets",
            "to one bucket",
            "of the cost hidden",
            "cores others took",
        ],
        lambda r: [
            str(r["stages"]),
            gigabits(r["rate"]),
            ms(r["transfer"]),
            ms(r["none"]),
            ms(r["whole"]),
            ms(r["buckets"]),
            f"{r['buckets'] / r['whole']:.2f}",
            f"{(r['whole'] - r['buckets']) / (r['whole'] - r['none']):.0%}",
            f"{r['others']:.2f}",
        ],
    ),
}


def command(
    only: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(QUESTIONS)}; all by default.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for stdout.")] = None,
) -> None:
    """What a network costs a job: its rate, its delay, a limit for each connection, and the loss of one."""
    names = chosen_of(only, list(QUESTIONS))

    async def body() -> None:
        found: dict[str, list[Row]] = {}
        calm: dict[Load, float] = {}
        with tempfile.TemporaryDirectory(prefix="bamboo-bench-") as folder, network(Path(folder)) as net:
            async with lab() as place:
                for name in names:
                    found[name] = await QUESTIONS[name](place, net, calm)
        if str(output) != "-":
            for name, rows in found.items():
                title, columns, cells = TABLES[name]
                show(title, columns, [cells(row) for row in rows])
        write_json(output, {"machine": machine(), "found": found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
