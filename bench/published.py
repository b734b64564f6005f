"""A comparison of `nsdi2023.simulator` with the published program itself, digit for digit.

    python bench/published.py CHECKOUT [--seeds 10] [--rates 0.01,0.05,0.1,0.25,0.5] [--start-hours 0,9,17] [--hours 12]
        [--whole-runs 3] [--trace FILE ...] [--random 0] [--csv FILE]

CHECKOUT: a folder with the published program as its authors released it (with project_pactum/simulation). Both programs
run each case, and their figures must be equal as floating-point numbers. Every model runs for --hours on generated
nodes, with each seed and rate, and on each recording (without --trace the checkout's); BERT also with 8 and 15 stages.
The two models with a published number of steps also run to their end. --random: this many generated recordings, each
for a random model and end, with many events at one moment and names that come back. --csv: the published program's
figures by case; tests/bench/test_nsdi2023.py compares with such a file.
"""

import csv as tables
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from _common import say, show
from bamboo.simulation.figures import SimulationError
from bamboo.traces.files import read_nodes
from nsdi2023.nodes import HourlyNodes, Moment, recorded
from nsdi2023.simulator import simulate
from nsdi2023.workloads import WORKLOADS, workload_of

PROGRAM = Path("project_pactum/simulation/simulator.py")
NAMES = {"gpt-2": "GPT-2", "bert": "BERT", "resnet": "ResNet", "gnmt": "GNMT", "vgg": "VGG", "alexnet": "AlexNet"}
OTHER_STAGES = (8, 15)  # of BERT
HOUR_MS = 3_600_000
RANDOM = "random-"  # the prefix of generated recordings' names
# ours: theirs
FIGURES = {
    "preemptions": "num_preemptions",
    "fatal": "num_fatal_failures",
    "steps": "num_steps_complete",
    "interval": "preemption_mean",
    "lifetime": "lifetime_mean",
    "nodes": "average_instances",
    "throughput": "average_performance",
    "usd_per_hour": "average_cost",
    "value": "average_value",
}
# In this order: a name comes back during a rendezvous, no step is done, an absent node goes, a grid has more pipelines
# than times are known for, no node ever comes, a step ends without a node.
ERRORS = (AssertionError, IndexError, KeyError, NotImplementedError, statistics.StatisticsError, ZeroDivisionError)
Found = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCase:
    """One run of both programs."""

    model: str
    stages: int
    hours: float | None  # when it is cut; None: after all its steps
    recording: str | None = None  # a file; None: generated nodes
    rate: float = 0.0
    seed: int = 0
    start_hour: int = 0

    def milliseconds(self) -> int | None:
        return None if self.hours is None else round(self.hours * HOUR_MS)

    def group(self) -> str:
        nodes = "made up" if self.recording is None else Path(self.recording).name
        if nodes.startswith(RANDOM):
            return "random recordings"
        return f"{NAMES[self.model]}, {self.stages} stages, {nodes}{'' if self.hours else ', whole run'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The results of both programs. refused_theirs, refused_ours: why a program has no figures; "" if it has some."""

    case: PublishedCase
    theirs: Found
    ours: Found
    refused_theirs: str
    refused_ours: str

    def differing(self) -> list[str]:
        """Return a text per differing figure, or one if only one program refuses the case; [] if they agree."""
        if bool(self.refused_theirs) != bool(self.refused_ours):
            return [f"theirs: {self.refused_theirs or 'figures'}; ours: {self.refused_ours or 'figures'}"]
        return [
            f"{name} {self.theirs[name]!r} here {self.ours[name]!r}"
            for name in self.theirs
            if self.theirs[name] != self.ours[name]
        ]


def load(checkout: Path) -> Any:
    """Return the published simulator's module, loaded by its path: the package around it needs more dependencies."""
    if "published_simulator" not in sys.modules:
        spec = importlib.util.spec_from_file_location("published_simulator", checkout / PROGRAM)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["published_simulator"] = module
        spec.loader.exec_module(module)
    return sys.modules["published_simulator"]


def theirs(checkout: Path, case: PublishedCase) -> tuple[Found, str]:
    """Run the published program; return its figures and "", or {} and the name of its error."""
    model, made_up = NAMES[case.model], {}
    if case.recording is None:
        made_up = {"seed": case.seed, "removal_probability": case.rate, "generate_addition_probabilities": True}
    with open(case.recording or os.devnull) as recording:
        traced = {} if case.recording is None else {"spot_instance_trace": recording}
        simulator = load(checkout).Simulator(model=model, start_hour=case.start_hour, **made_up, **traced)
        simulator.num_stages_target = case.stages
        try:
            result = simulator.simulate(duration=case.milliseconds())
        except ERRORS as error:
            return {}, type(error).__name__
    return {name: getattr(result, other) for name, other in FIGURES.items()} | {
        "hours": simulator.performance_xs[-1]
    }, ""


def ours(case: PublishedCase) -> tuple[Found, str]:
    """Run Bamboo's copy of the simulator; return its figures and "", or {} and the message of its error."""
    workload = workload_of(case.model, case.stages)
    nodes: HourlyNodes | list[Moment]
    if case.recording is not None:
        nodes = recorded(read_nodes([case.recording]))
    else:
        nodes = HourlyNodes(case.seed, case.rate, workload.capacity, case.start_hour)
    steps = workload.steps if case.hours is None else None
    try:
        found = simulate(workload, nodes, steps=steps, milliseconds=case.milliseconds())
    except SimulationError as error:
        return {}, str(error)
    return asdict(found), ""


def compare(checkout: Path, case: PublishedCase) -> Compared:
    published, why = theirs(checkout, case)
    found, why_not = ours(case)
    return Compared(case=case, theirs=published, ours=found, refused_theirs=why, refused_ours=why_not)


def cases(
    seeds: int, rates: Sequence[float], start_hours: Sequence[int], hours: float, whole_runs: int, traces: Sequence[str]
) -> Iterator[PublishedCase]:
    for model, workload in WORKLOADS.items():
        for stages in (workload.stages, *(OTHER_STAGES if model == "bert" else ())):
            for recording in traces:
                yield PublishedCase(model=model, stages=stages, hours=hours, recording=recording)
            for rate in rates:
                for seed in range(1, seeds + 1):
                    start_hour = start_hours[seed % len(start_hours)]
                    yield PublishedCase(
                        model=model, stages=stages, hours=hours, rate=rate, seed=seed, start_hour=start_hour
                    )
        for rate in rates if workload.steps else ():
            for seed in range(1, whole_runs + 1):
                yield PublishedCase(model=model, stages=workload.stages, hours=None, rate=rate, seed=seed)


def random_recording(rng: random.Random) -> str:
    """Return a random recording as CSV. Nodes come and go in bursts, some of them under names used before."""
    unit, reused = rng.choice((1, 1000, 5000, 30_000, 60_000)), rng.choice((0.0, 0.5))
    end, most = rng.choice((1, 3, 8)) * HOUR_MS, rng.choice((5, 12, 20, 29, 40))
    present: list[str] = []
    gone: list[str] = []
    lines: list[str] = []
    now, named = rng.choice((0, rng.randrange(600_000) // unit * unit)), 0
    while now < end:
        if not lines or (rng.random() < 0.5 and len(present) < most):
            wanted = rng.choice((1, 1, 2, 5)) if lines else rng.randrange(1, most + 1)
            for _ in range(min(wanted, most - len(present))):
                if gone and rng.random() < reused:
                    present.append(gone.pop(rng.randrange(len(gone))))
                else:
                    named += 1
                    present.append(f"node{named}")
                lines.append(f"{now},add,{present[-1]}\n")
        else:
            for node in rng.sample(present, min(len(present), rng.choice((1, 1, 2, 3, 6)))):
                present.remove(node)
                gone.append(node)
                lines.append(f"{now},remove,{node}\n")
        now += int(rng.expovariate(1 / rng.choice((3000, 20_000, 240_000)))) // unit * unit
    return "".join(lines)


def random_cases(count: int, folder: Path) -> Iterator[PublishedCase]:
    grids = [(model, workload.stages) for model, workload in WORKLOADS.items()]
    grids += [("bert", stages) for stages in OTHER_STAGES]
    for seed in range(count):
        rng = random.Random(seed)
        file = folder / f"{RANDOM}{seed}.csv"
        file.write_text(random_recording(rng))
        model, stages = rng.choice(grids)
        hours = rng.choice((0.5, 1, 2.37, 5, 12))
        yield PublishedCase(model=model, stages=stages, hours=hours, recording=str(file), seed=seed)


def write_table(file: Path, found: Sequence[Compared]) -> None:
    """Write a CSV line for each case: the published program's figures with all digits, or its error's name."""
    with file.open("w", newline="") as opened:
        table = tables.DictWriter(opened, [*asdict(found[0].case), "refused", *FIGURES, "hours_run"], restval="")
        table.writeheader()
        for one in found:
            figures = {("hours_run" if name == "hours" else name): value for name, value in one.theirs.items()}
            recording = one.case.recording and Path(one.case.recording).name
            table.writerow(asdict(one.case) | {"recording": recording, "refused": one.refused_theirs} | figures)


def commit(checkout: Path) -> str:
    """Return the commit of the checkout; "unknown" if it is no git repository."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def run(
    checkout: Annotated[Path, typer.Argument(help="A checkout of the published program.")],
    seeds: Annotated[int, typer.Option(min=0, help="Of made-up nodes, for each model and rate.")] = 10,
    rates: Annotated[str, typer.Option(help="Probabilities within an hour, with commas.")] = "0.01,0.05,0.1,0.25,0.5",
    start_hours: Annotated[str, typer.Option(help="Hours of the day, with commas; seeds take turns.")] = "0,9,17",
    hours: Annotated[float, typer.Option(min=0.1, help="After which runs are cut.")] = 12,
    whole_runs: Annotated[int, typer.Option(min=0, help="Seeds of runs to the published number of steps.")] = 3,
    trace: Annotated[list[str] | None, typer.Option(help="A recording, as milliseconds,add|remove,node.")] = None,
    random_recordings: Annotated[int, typer.Option("--random", min=0, help="Made-up recordings.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the published program's figures to this file.")] = None,
) -> None:
    """Run both programs on all cases and report which figures agree. Exits with 1 if any differ."""
    if not (checkout / PROGRAM).is_file():
        raise typer.BadParameter(f"there is no {checkout / PROGRAM}")
    traces = trace if trace is not None else sorted(str(file) for file in (checkout / "traces").glob("*.csv"))
    wanted = list(
        cases(
            seeds,
            [float(text) for text in rates.split(",")],
            [int(text) for text in start_hours.split(",")],
            hours,
            whole_runs,
            traces,
        )
    )
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs) as pool:
        wanted += random_cases(random_recordings, Path(folder))
        say(f"{len(wanted)} cases, published program at {commit(checkout)}")
        found = list(pool.map(partial(compare, checkout), wanted, chunksize=4))
    count: dict[str, Counter[str]] = {}
    for one in found:
        kind = "differ" if one.differing() else "refused by both" if one.refused_ours else "agree"
        count.setdefault(one.case.group(), Counter())[kind] += 1
        for text in one.differing():
            print(f"{one.case.group()}, rate {one.case.rate:g}, seed {one.case.seed}: {text}")
    kinds = ("agree", "refused by both", "differ")
    total = {kind: sum(counter[kind] for counter in count.values()) for kind in kinds}
    rows = [[group, *(str(counter[kind]) for kind in kinds)] for group, counter in count.items()]
    agree, refused = total["agree"], total["refused by both"]
    title = f"{agree} of {len(found)} cases agree in all figures, {refused} are refused by both"
    show(title, ["cases", *kinds], rows)
    if csv is not None:
        write_table(csv, found)
    if total["differ"]:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(run)
