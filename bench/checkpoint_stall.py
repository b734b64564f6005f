"""What training waits for a checkpoint, with a large state, against the same job without checkpoints.

    python bench/checkpoint_stall.py [--mebibytes 1024] [--every 20] [--checkpoints 2] [--repeat 2]
    python bench/checkpoint_stall.py --alone         # one worker's work in one process, in CPU time: on a busy machine

Layers sleep, as if each worker had an accelerator of its own, and have parameters that nothing changes, so that the
job's state (with AdamW's, once) has that size; processes and sockets are real, and files are written and synced. Runs
without and with checkpoints in turn; a ratio is made of two runs of the same round.

    stall       for how long the worker that waited longest did so for its copies, of a usual step and of all of them
    next step   how much longer the step after a checkpoint's takes than the median, in which the copies are made
    all steps   how much longer the mean step takes than without checkpoints: also for what is written beside it

Alone: a stage of a GPT model of that size runs a step of eight microbatches of 128 tokens, then all its layers are
copied, as the only one who holds it would have to: at once, as if it never waited for others, and in pieces.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from _common import Job, Lab, TaskName, lab, machine, main, manifest, median, say, show, write_json
from bamboo_core.control.channel_events import Received
from bamboo_core.control.protocol import PartsWritten
from bamboo_core.coordinator.events import Event
from bamboo_trainer.models import gpt
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.training import TrainingConfig

WARMUP = 6
MICROBATCHES = 8
CONTEXT = 128  # tokens of a sample
TARGET = 2.0  # percent of a step


@dataclass(slots=True)
class Stalls:
    """The longest wait that a worker has told, by step of the checkpoint."""

    seconds: dict[int, float] = field(default_factory=dict)

    def look(self, now: float, event: Event, commands: Any) -> None:
        if isinstance(event, Received) and isinstance(event.message, PartsWritten):
            step = event.message.checkpoint.step
            self.seconds[step] = max(self.seconds.get(step, 0.0), event.message.stall)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallOptions:
    mebibytes: int
    stages: int
    forward_ms: float
    every: int
    checkpoints: int

    @property
    def steps(self) -> int:
        """The last state is kept as well: not among those that count."""
        return WARMUP + self.every * (self.checkpoints + 1)


def document(o: StallOptions, folder: Path | None) -> Any:
    """folder: of the checkpoints, if there are to be any."""
    result = manifest(TaskName.EMULATED, o.stages, MICROBATCHES, o.steps, mode="LazyForward")
    layers = 4 * o.stages
    each = o.forward_ms / 4
    ballast = (o.mebibytes << 20) // (12 * layers)
    result["spec"]["task"]["config"] = {
        "layers": layers,
        "forwardMs": each,
        "backwardMs": 2 * each,
        "ballast": ballast,
    }
    if folder:
        result["spec"]["checkpoint"] = {"storage": {"uri": folder.as_uri()}, "everySteps": o.every, "keepLatest": 1}
    return result


async def once(place: Lab, o: StallOptions, kept: bool) -> tuple[list[float], dict[int, float]]:
    """Each step's seconds, and the stalls."""
    job, stalls = Job(place, document(o, place.new_folder() if kept else None), main="_recorder:record"), Stalls()
    job.look = stalls.look
    await job.run()
    times = [job.committed[step] for step in range(o.steps)]
    return [times[k] - times[k - 1] for k in range(1, o.steps)], stalls.seconds


def figures(o: StallOptions, plain: list[float], kept: list[float], stalls: dict[int, float]) -> dict[str, float]:
    """Percent of a step. plain, kept: seconds of the steps from 1 on."""
    marks = [step for step in stalls if step < o.steps]
    counted = slice(min(marks) - 1, min(marks) - 1 + o.every * o.checkpoints)
    usual = median(kept[counted])
    mean, without = (sum(part[counted]) / (o.every * o.checkpoints) for part in (kept, plain))
    stall = median([stalls[step] for step in marks])
    return {
        "step_ms": 1e3 * usual,
        "stall_ms": 1e3 * stall,
        "stall_of_a_step": 100 * stall / usual,
        "stall_of_all": 100 * stall / (o.every * usual),
        "next_step": 100 * (median([kept[step - 1] for step in marks]) / usual - 1),
        "all_steps": 100 * (mean / without - 1),
    }


def alone(o: StallOptions, repeat: int) -> None:
    """CPU time of one thread."""
    width, found = 1024, list[tuple[float, float, float]]()
    blocks = max(1, (o.mebibytes << 20) // (12 * 12 * width**2))
    with gpt_stage(width, blocks) as stage:
        layers = stage.values.layers_needed()
        step_of(stage)  # the first one is looked at more closely
        for _ in range(repeat):
            step = cpu_seconds(lambda: step_of(stage))
            whole = cpu_seconds(lambda: stage.values.layer_states(layers))
            copying = stage.values.late_copies(layers)
            pieces = list[float]()
            while not copying.done:
                pieces.append(cpu_seconds(copying.copy_piece))
            found.append((step, whole, max(pieces)))
    step, whole, piece = (median([one[i] for one in found]) for i in range(3))
    size = 12 * stage.values.final.size / 2**20
    rows = [
        ("a step", f"{step:.2f} s", ""),
        ("all copied at once", f"{1e3 * whole:.0f} ms", f"{100 * whole / step:.2f} % of a step"),
        (f"the same of {o.every} steps", "", f"{100 * whole / step / o.every:.3f} % (target: under {TARGET:g})"),
        ("one piece, at most", f"{1e3 * piece:.1f} ms", f"{100 * piece / step:.3f} % of a step"),
    ]
    show(f"{size:.0f} MiB of state on one worker, CPU time, median of {repeat}", ("", "", ""), rows)


@contextmanager
def gpt_stage(width: int, blocks: int) -> Iterator[Stage]:
    """All layers of a GPT model as one stage in this process, on one thread, with microbatches of one sample."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text("def f(): pass\n" * 2000)
        task = gpt.build({"dModel": width, "heads": 8, "blocks": blocks, "context": CONTEXT, "text": str(text)})
        config = TrainingConfig(
            seed=0, precision="fp32", max_gradient_norm=None, microbatches=MICROBATCHES, micro_batch_size=1
        )
        yield build_stage(task, 0, [(0, len(task.layers))], config)


def step_of(stage: Stage) -> None:
    work = stage.begin(range(MICROBATCHES), (0, MICROBATCHES))
    for microbatch in range(MICROBATCHES):
        stage.forward(work, 0, microbatch, None)
        stage.backward(work, 0, microbatch, None)
    stage.values.apply(work.gradients.total(), 1.0, *stage.values.final.folded(work.contributions))


def cpu_seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


async def measure(o: StallOptions, repeat: int) -> list[dict[str, float]]:
    found = []
    async with lab() as place:
        for number in range(repeat):
            plain, _ = await once(place, o, kept=False)
            kept, stalls = await once(place, o, kept=True)
            found.append(figures(o, plain, kept, stalls))
            say(f"{number + 1}/{repeat}: {found[-1]}")
    return found


def report(o: StallOptions, found: list[dict[str, float]]) -> None:
    title = f"{o.mebibytes} MiB in {o.stages} stages, a checkpoint every {o.every} steps; median of {len(found)}"
    middle = {name: median([one[name] for one in found]) for name in found[0]}
    rows = [
        ("a usual step", f"{middle['step_ms']:.0f} ms", ""),
        ("stall", f"{middle['stall_ms']:.1f} ms", f"{middle['stall_of_a_step']:.2f} % of a step"),
        ("stall, of all steps", "", f"{middle['stall_of_all']:.3f} % (target: under {TARGET:g})"),
        ("next step", "", f"{middle['next_step']:+.1f} %"),
        ("all steps", "", f"{middle['all_steps']:+.1f} %"),
    ]
    show(title, ("", "", ""), rows)


def command(
    mebibytes: Annotated[int, typer.Option(help="The job's state.")] = 1024,
    stages: int = 2,
    forward_ms: Annotated[float, typer.Option(help="Of a stage; a backward takes twice that.")] = 40.0,
    every: int = 20,
    checkpoints: int = 2,
    repeat: int = 2,
    in_process: Annotated[bool, typer.Option("--alone", help="One worker's work only, in CPU time.")] = False,
    json: Path | None = None,
) -> None:
    """What training waits for a checkpoint."""
    o = StallOptions(mebibytes=mebibytes, stages=stages, forward_ms=forward_ms, every=every, checkpoints=checkpoints)

    if in_process:
        alone(o, repeat)
        return

    async def body() -> None:
        found = await measure(o, repeat)
        report(o, found)
        write_json(json, {"machine": machine(), "found": found})

    main(body())


if __name__ == "__main__":
    typer.run(command)
