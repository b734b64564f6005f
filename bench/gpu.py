"""A benchmark of Bamboo on this machine's devices against plain PyTorch, in about ten minutes.

    python bench/gpu.py [--minutes 10] [--only throughput,kills] > report.json
    python bench/gpu.py --small --minutes 2        # tiny sizes, to test that all works

It prints one JSON object, and its progress on standard error. It trains Llama 3.2 1B in bf16 (on a single small GPU
with fewer blocks and a smaller vocabulary), or a small Llama on CPUs. Workers share the GPU if there is only one.
`left_out` names the measurements that were skipped for lack of time.

    throughput     tokens per second of one plain PyTorch process and of one and several workers, eager and compiled
    modes          the step time with each redundancy mode, relative to mode None
    determinism    a step with `training.deterministic`, relative to one without; whether a job that loses two workers
                   ends with the same bits as an undisturbed job on another grid
    kills          workers that are killed one after the other: pauses, the affected steps, and the memory in use before
                   the first loss and after each one (of the GPUs; without GPUs of the processes)
"""

import math
import os
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from torch import nn

import bamboo
from _common import chosen_of, machine, say, write_json
from bamboo.jobs.results import JobProgress
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.loading import settled_task
from bamboo_trainer.tasks.mixed_precision import autocast
from bamboo_trainer.tasks.scheduled_optimizer import fuse
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, load_batch, task_loss
from bamboo_trainer.training import TrainingConfig

PARTS: Final = ("throughput", "modes", "determinism", "kills")
SHARES: Final = {"throughput": 0.4, "modes": 0.2, "determinism": 0.15, "kills": 0.25}  # of the time
MODES: Final = ("None", "Replicas")
ROUNDS: Final = 2  # in which the sides of a comparison take turns
LEAST_SECONDS: Final = 5.0  # a measurement with less time is left out
MANY_STEPS: Final = 1_000_000
BITS_STEPS: Final = 8
CALM: Final = 2  # steps between a survived loss and the next one
POLL_SECONDS: Final = 0.1
ROOM: Final = 70e9  # bytes of a GPU with room for two workers with the whole model
PAUSE: Final = re.compile(r"pause (\d+) ms")
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model and batch to train, and the number of steps to measure.

    tokens: per sample. samples: per microbatch. warmup: first steps, which do not count, since they compile layers.
    least: the fewest counted steps. workers: of the widest pipeline. compiled: whether to measure compiled layers.
    """

    config: Mapping[str, Any]
    tokens: int
    samples: int
    microbatches: int
    precision: str
    workers: int
    least: int
    compiled: bool
    warmup: int = 3

    @property
    def batch(self) -> int:
        return self.samples * self.microbatches


def sizes_of(*, small: bool) -> Sizes:
    """Return sizes that suit this machine's devices, or tiny ones if `small`."""
    gpus = torch.cuda.device_count()
    workers = max(2, min(gpus, 8))
    if small:
        config: dict[str, Any] = {"size": "tiny"}
        return Sizes(
            config=config, tokens=16, samples=1, microbatches=4, precision="fp32", workers=2, least=3, compiled=False
        )
    if not gpus:
        config = {"size": "tiny", "vocabulary": 512, "width": 128, "inner": 256, "blocks": 6, "positions": 64}
        return Sizes(
            config=config, tokens=64, samples=2, microbatches=4, precision="fp32", workers=2, least=5, compiled=True
        )
    has_room = torch.cuda.get_device_properties(0).total_memory >= ROOM or gpus > 1
    config = {"size": "3.2-1b"} if has_room else {"size": "3.2-1b", "blocks": 4, "vocabulary": 32000}
    return Sizes(
        config=config,
        tokens=2048,
        samples=1,
        microbatches=4 * workers,
        precision="bf16",
        workers=workers,
        least=10,
        compiled=True,
    )


def job_of(sizes: Sizes, stages: int, steps: int = MANY_STEPS, *, mode: str = "None", **training: Any) -> bamboo.Job:
    """Return a job with one pipeline. It has a standby worker unless the redundancy mode is None."""
    return bamboo.Job(
        "bench",
        task="bamboo_trainer.models.llama:build",
        config={**sizes.config, "data": {"length": sizes.tokens}},
        training={
            "steps": steps,
            "globalBatchSize": sizes.batch,
            "microBatchSize": sizes.samples,
            "precision": sizes.precision,
            **training,
        },
        topology={"stages": stages},
        redundancy={"mode": mode},
        standby={"workers": 0 if mode == "None" else 1},
    )


class Clock:
    """The remaining time of a part of the benchmark. left_out: the measurements that were skipped for lack of time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def measure(self, what: str, work: Callable[[float], Figures], others: int = 0) -> Figures:
        """Run a measurement in its share of the time. Return its figures, {"problem": message} if it fails, or {} if
        less than LEAST_SECONDS are left for it. others: the number of later measurements that share the time.
        """
        seconds = (self._end - time.monotonic()) / (1 + others)
        if seconds < LEAST_SECONDS:
            self.left_out.append(what)
            return {}
        say(f"{what}, at most {seconds:.0f} s")
        try:
            return work(seconds)
        except (bamboo.BambooError, RuntimeError, TimeoutError) as error:
            say(f"{what}: {error}")
            return {"problem": str(error).partition("\n")[0]}


def steps_of(handle: bamboo.JobHandle, sizes: Sizes) -> list[tuple[float, float]]:
    """Return (commit's Unix time, duration in seconds) for each counted step of an ended job."""
    ends = [row["time"] for row in handle.history() if row["kind"] == "step"]
    return [(end, end - before) for before, end in pairwise(ends)][sizes.warmup - 1 :]


def train(job: bamboo.Job, sizes: Sizes, seconds: float) -> Figures:
    """Train a job until enough steps count, and return their figures. Raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    with job.run(page=False) as handle:
        reach(handle, lambda now: now.step >= sizes.warmup + sizes.least, end)
        handle.stop()
        steps = steps_of(handle, sizes)
    return measured(sizes, [seconds for _, seconds in steps])


def reach(handle: bamboo.JobHandle, met: Callable[[JobProgress], bool], end: float) -> None:
    """Wait until the job's progress meets a condition. Raises TimeoutError after `end`, RuntimeError if the job
    completes before, and BambooError if it fails.
    """
    while not met(handle.progress):
        try:
            handle.wait(POLL_SECONDS)
            raise RuntimeError("the job was complete too early")
        except bamboo.NotInTime:
            if time.monotonic() > end:
                raise TimeoutError(f"no time was left after step {handle.progress.step}") from None


def measured(sizes: Sizes, seconds: list[float]) -> Figures:
    step = statistics.median(seconds)
    return {"step": step, "least": min(seconds), "most": max(seconds), "tokens": sizes.batch * sizes.tokens / step}


def train_plainly(document: Any, sizes: Sizes, compiled: bool, seconds: float) -> Figures:
    """Train a job in this process with plain PyTorch; return its figures. Raises TimeoutError after `seconds`."""
    end, times = time.monotonic() + seconds, list[float]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # as in a worker
    task, spec = settled_task(parse_manifest(document))
    training = TrainingConfig.of(spec.training)
    built = [build_layer(task, training.seed, index) for index in range(len(task.layers))]
    tie(dict(enumerate(built)), tied_groups(task), task, training.seed)
    layers = nn.ModuleList(built).to(device)
    optimizer = task.optimizer(list(layers.named_parameters()))
    fuse(optimizer)
    for layer in layers if compiled else ():
        layer.compile()
    for step in range(sizes.warmup + sizes.least):
        began = time.monotonic()
        optimizer.zero_grad()
        for microbatch in range(training.microbatches):
            inputs, targets = (
                tuple(part.to(device, non_blocking=True) for part in parts)
                for parts in load_batch(task, training.samples(step, microbatch, task.dataset))
            )
            with autocast(device, training.precision):
                given: Any = inputs[0] if len(inputs) == 1 else inputs
                for layer in layers:
                    given = call_layer(layer, given)
                loss, weight = task_loss(task, given if isinstance(given, tuple) else (given,), targets)
            (loss / (1.0 if weight is None else weight) / training.microbatches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - began)
        if time.monotonic() > end:
            raise TimeoutError(f"no time was left after step {step + 1}")
    return measured(sizes, times[sizes.warmup :])


def in_a_process(work: Callable[[float], Figures], seconds: float) -> Figures:
    """Run a function in its own process, so that the GPU's memory is free afterwards, and return its figures."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, seconds).result()


def take_turns(clock: Clock, figure: str, sides: Mapping[str, Callable[[float], Figures]]) -> Figures:
    """Measure the sides in turns. Return each side's fastest round; `ratio` is its `figure` over the first side's."""
    fastest: dict[str, Figures] = {name: {} for name in sides}
    turns = [(number, name) for number in range(ROUNDS) for name in sides]
    for at, (number, name) in enumerate(turns):
        now = clock.measure(f"{name}, round {number + 1}", sides[name], others=len(turns) - at - 1)
        if not fastest[name] or now.get("step", math.inf) < fastest[name].get("step", math.inf):
            fastest[name] = now
    first = next(iter(fastest.values())).get(figure)
    ratios = {name: {"ratio": one[figure] / first} for name, one in fastest.items() if first and figure in one}
    return {name: one | ratios.get(name, {}) for name, one in fastest.items()}


def throughput(clock: Clock, sizes: Sizes) -> Figures:
    """Measure plain PyTorch, one worker and the widest pipeline, eager and, if sizes.compiled, with compiled layers."""
    sides: dict[str, Callable[[float], Figures]] = {}
    for how, compiled in (("eager", False), ("compiled", True))[: 2 if sizes.compiled else 1]:
        plain = partial(train_plainly, job_of(sizes, 1).document, sizes, compiled)
        sides[f"plain PyTorch, {how}"] = partial(in_a_process, plain)
        for workers in (1, sizes.workers):
            job = job_of(sizes, workers, compile=compiled)
            sides[f"{workers} of Bamboo's workers, {how}"] = partial(train, job, sizes)
    return take_turns(clock, "tokens", sides)


def modes(clock: Clock, sizes: Sizes) -> Figures:
    sides = {mode: partial(train, job_of(sizes, sizes.workers, mode=mode), sizes) for mode in MODES}
    return take_turns(clock, "step", sides)


def determinism(clock: Clock, sizes: Sizes) -> Figures:
    found = clock.measure("the bits of a job that loses workers", partial(same_bits, sizes), others=2)
    sides = {
        f"deterministic: {str(on).lower()}": partial(train, job_of(sizes, 1, deterministic=on), sizes)
        for on in (False, True)
    }
    return found | take_turns(clock, "step", sides)


def same_bits(sizes: Sizes, seconds: float) -> Figures:
    """Compare the weights of a job that loses workers with an undisturbed job's on another grid, bit for bit."""
    end = time.monotonic() + seconds
    disturbed = job_of(sizes, sizes.workers, BITS_STEPS, mode="Replicas")
    with (
        disturbed.run(page=False, preempt=("at:3:1", "at:6:0")) as one,
        job_of(sizes, 1, BITS_STEPS).run(page=False) as other,
    ):
        lost = one.wait(max(0.0, end - time.monotonic())).preemptions
        other.wait(max(0.0, end - time.monotonic()))
        weights, undisturbed = one.weights(), other.weights()
    equal = weights.keys() == undisturbed.keys() and all(
        torch.equal(tensor, undisturbed[name]) for name, tensor in weights.items()
    )
    return {"losses": lost, "bits_equal": equal}


def kills(clock: Clock, sizes: Sizes, losses: int) -> Figures:
    return clock.measure(f"{losses} losses", partial(kill, sizes, losses))


def kill(sizes: Sizes, losses: int, seconds: float) -> Figures:
    """Kill workers in turn, at random moments of a healed job; return figures. Raises TimeoutError if it kills none."""
    end, moments, memory, rng = time.monotonic() + seconds, list[float](), list[int](), random.Random(0)
    with job_of(sizes, sizes.workers, mode="Replicas").run(page=False) as handle:
        with suppress(TimeoutError):
            for number in range(losses + 1):
                calm = handle.progress.step + CALM
                reach(handle, partial(is_whole, sizes, calm), end)
                memory.append(bytes_in_use())
                if number == losses:
                    break
                speed = handle.progress.samples_per_second or math.inf
                time.sleep(rng.random() * sizes.batch / speed)
                moments.append(time.time())
                handle.preempt(handle.progress.grid[0][number % sizes.workers])
                reach(handle, partial(has_taken_over, number + 1), end)
        handle.stop()
        steps = steps_of(handle, sizes)
        events = list(handle.events())
    if not moments or not steps:
        raise TimeoutError("no time was left to kill a worker")
    calm_step = statistics.median(seconds for _, seconds in steps)
    affected = [next((seconds for end, seconds in steps if end > moment), math.nan) for moment in moments]
    matches = (PAUSE.search(event.message) for event in events if event.reason == "TakenOver")
    pauses = [int(one[1]) for one in matches if one]
    return {
        "losses": len(moments),
        "pauses_ms": pauses,
        "pause_ms": statistics.median(pauses) if pauses else None,
        "step": calm_step,
        "affected_over_step": [seconds / calm_step for seconds in affected],
        "bytes_in_use": memory,
        "bytes_grown": memory[-1] - memory[0],
    }


def is_whole(sizes: Sizes, calm: int, now: JobProgress) -> bool:
    """Return whether the job runs undegraded, has a standby worker, and has passed step `calm` and warmup."""
    return now.state == "Running" and now.workers > sizes.workers and now.step >= max(calm, sizes.warmup)


def has_taken_over(number: int, now: JobProgress) -> bool:
    return now.takeovers >= number


def bytes_in_use() -> int:
    """Return the bytes in use on all GPUs; without GPUs, the private bytes of this process's descendants."""
    if torch.cuda.is_available():
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return sum(int(line) for line in said.stdout.split()) << 20
    return sum(private_bytes(pid) for pid in below(os.getpid()))


def below(pid: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it may have ended
            for child in map(int, tasks.read_text().split()):
                yield child
                yield from below(child)


def private_bytes(pid: int) -> int:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    return 0


def run(
    minutes: Annotated[float, typer.Option(min=0.1, help="For all of it.")] = 10.0,
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}, with commas.")] = ",".join(PARTS),
    losses: Annotated[int, typer.Option(min=1, help="Workers that are killed.")] = 25,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes: whether all works, not how fast.")] = False,
) -> None:
    """Run the measurements and print them as one JSON object. Exits with 1 if bits differ."""
    end = time.monotonic() + 60 * minutes
    chosen, sizes = chosen_of(only.split(","), PARTS), sizes_of(small=small)
    work: dict[str, Callable[[Clock], Figures]] = {
        "throughput": lambda clock: throughput(clock, sizes),
        "modes": lambda clock: modes(clock, sizes),
        "determinism": lambda clock: determinism(clock, sizes),
        "kills": lambda clock: kills(clock, sizes, losses),
    }
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    report: Figures = {"machine": machine(), "gpus": gpus, "sizes": asdict(sizes)}
    left_out = list[str]()
    waiting = [part for part in PARTS if part in chosen]
    for at, part in enumerate(waiting):
        share = SHARES[part] / sum(SHARES[one] for one in waiting[at:])
        clock = Clock(share * (end - time.monotonic()))
        report[part] = work[part](clock)
        left_out += [f"{part}: {what}" for what in clock.left_out]
    write_json(Path("-"), report | {"left_out": left_out})
    if report.get("determinism", {}).get("bits_equal") is False:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(run)
