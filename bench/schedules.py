"""What a schedule of a pipeline is worth when boundary tensors take time on their way.

    python bench/schedules.py [--stages 4] [--microbatches 8] [--json FILE]

Arithmetic, no processes: the orders of instructions are Bamboo's own (`bamboo_core.planning.schedule`) and those that
torch's schedules generate; forwards, input gradients and weight gradients of a whole stage take one unit each. Torch's
interleaved ones give each worker two stages of half the size, and send nothing between two stages of one worker.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from _common import machine, show, write_json
from _pipelining import TorchSchedule
from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.schedule import Backward, BackwardInput, BackwardWeight, Forward, StageOrder

UNITS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}  # of a whole stage; B: input and weight gradients at once
KINDS = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}
TORCH_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
DELAYS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
STEPS = 4  # that are run one after the other; the first one does not count
ZERO_BUBBLE, ZBV = "ZBH1, lookahead 1", "ZBV"


class Part(NamedTuple):
    """One instruction of a worker."""

    kind: str
    stage: int
    microbatch: int


class Schedule(NamedTuple):
    """The schedule of a step as orders of stages."""

    orders: Sequence[Sequence[Part]]  # of each worker
    workers: Sequence[int]  # of each stage
    share: float  # of a worker's layers that one stage has


def own(order: StageOrder, stages: int, microbatches: int) -> Schedule:
    orders = [
        [Part(KINDS[type(one)], stage, one.microbatch) for one in order.program(stage, stages, range(microbatches))]
        for stage in range(stages)
    ]
    return Schedule(orders, range(stages), 1.0)


def of_torch(kind: TorchSchedule, world: int, microbatches: int) -> Schedule:
    """The schedule as torch generates it: for that a group of so many ranks is enough that never say a word."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        numbers = kind.stages(0, world)
        count, place = world * len(numbers), torch.device("cpu")
        stages = [PipelineStage(nn.Identity(), number, count, place) for number in numbers]
        made: Mapping[int, Sequence[Any]] = kind.made(stages, microbatches, nn.functional.mse_loss).pipeline_order
        orders = [[_part(action) for action in made[rank] if action is not None] for rank in range(world)]
    finally:
        dist.destroy_process_group()
    workers = {number: rank for rank in range(world) for number in kind.stages(rank, world)}
    return Schedule(orders, [workers[stage] for stage in range(count)], 1 / len(numbers))


def _part(action: Any) -> Part:
    return Part(TORCH_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


def seconds_of_step(schedule: Schedule, delay: float, *, together: bool, units: Mapping[str, float] = UNITS) -> float:
    """The units of a step, one of several that follow each other. delay: of a boundary tensor, from worker to worker.

    together: no worker begins a step before all have ended the one before, as where the norm of all gradients, or a
    commit, is waited for; else each goes on when it has ended its own.
    """
    free = [0.0] * len(schedule.orders)
    ends = []
    for _ in range(STEPS):
        free = _run(schedule, delay, [max(free)] * len(free) if together else free, units)
        ends.append(max(free))
    return (ends[-1] - ends[0]) / (STEPS - 1)


def _run(schedule: Schedule, delay: float, free: Sequence[float], units: Mapping[str, float]) -> list[float]:
    """One step. free: when each worker may begin; returned: when each has ended."""
    now, done = [*free], [0] * len(free)
    here: dict[tuple[str, int, int], float] = {}  # when the input of an instruction has arrived
    last = len(schedule.workers) - 1
    while any(count < len(order) for count, order in zip(done, schedule.orders, strict=True)):
        before = sum(done)
        for worker, order in enumerate(schedule.orders):
            while done[worker] < len(order):
                kind, stage, microbatch = order[done[worker]]
                waits = stage > 0 if kind == "F" else stage < last and kind != "W"
                direction = "F" if kind == "F" else "B"
                if waits and (direction, stage, microbatch) not in here:
                    break
                begin = max(now[worker], here[direction, stage, microbatch]) if waits else now[worker]
                now[worker] = begin + units[kind] * schedule.share
                done[worker] += 1
                to = stage + (1 if kind == "F" else -1)
                if kind != "W" and 0 <= to <= last:
                    way = 0.0 if schedule.workers[to] == worker else delay
                    here[direction, to, microbatch] = now[worker] + way
        assert sum(done) > before, "every worker waits for another one"
    return now


def schedules(stages: int, microbatches: int) -> dict[str, Schedule]:
    plain, split = PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZB_H1
    wanted: dict[str, Callable[[], Schedule]] = {
        "1F1B, lookahead 0": lambda: own(StageOrder(plain, 0), stages, microbatches),
        "1F1B, lookahead 1": lambda: own(StageOrder(plain, 1), stages, microbatches),
        "ZBH1, lookahead 0": lambda: own(StageOrder(split, 0), stages, microbatches),
        ZERO_BUBBLE: lambda: own(StageOrder(split, 1), stages, microbatches),
        "interleaved": lambda: of_torch(TorchSchedule.INTERLEAVED_ZERO_BUBBLE, stages, microbatches),
        ZBV: lambda: of_torch(TorchSchedule.ZBV, stages, microbatches),
    }
    return {name: make() for name, make in wanted.items()}


def run(
    stages: Annotated[int, typer.Option(min=2, help="Workers of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches a step.")] = 8,
    json: Annotated[Path | None, typer.Option(help='Write the figures to this file, or to "-".')] = None,
) -> None:
    """Print what a step takes with each schedule, by how long a boundary tensor is on its way."""
    made = schedules(stages, microbatches)
    found = {
        together: {
            name: {delay: seconds_of_step(one, delay, together=together) for delay in DELAYS}
            for name, one in made.items()
        }
        for together in (True, False)
    }
    for together, by_name in found.items():
        rows = [
            [
                f"{delay:g}",
                *(f"{steps[delay]:.2f}" for steps in by_name.values()),
                f"{by_name[ZERO_BUBBLE][delay] / by_name[ZBV][delay]:.3f}",
            ]
            for delay in DELAYS
        ]
        how = "all begin a step together" if together else "each worker goes on by itself"
        title = f"A step of {stages} stages and {microbatches} microbatches, in forwards of a stage; {how}"
        show(title, ["way of a boundary", *by_name, f"{ZERO_BUBBLE} / ZBV"], rows)
    names = {True: "together", False: "by_itself"}
    figures = {names[together]: by_name for together, by_name in found.items()}
    write_json(json, {"machine": machine(), "stages": stages, "microbatches": microbatches, "steps": figures})


if __name__ == "__main__":
    typer.run(run)
