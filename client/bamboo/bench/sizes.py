"""The choice of what is measured: a Llama that fits into this machine, and the grids that it is trained on. Pure."""

from dataclasses import dataclass
from typing import Any, Final

from bamboo.bench.report import BenchModel, MachineFound

GB: Final = 10**9
ENTRYPOINT: Final = "bamboo_trainer.models.llama:build"
MOST_WORKERS: Final = 8
OWNED, COPIED = 16, 12  # bytes a parameter: fp32 values, gradients, two averages; and of a replica all but gradients
BESIDE: Final = 8 * GB  # activations, logits, the log and torch itself, on each device
LARGE: Final = 70 * GB  # of a device's memory, from which on a microbatch has two samples


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSize:
    """A Llama that may be measured. parameters: of all of it, in billions."""

    name: str
    config: dict[str, Any]
    parameters: float


# The largest first. Those with few blocks are for small GPUs: each of their blocks is one of Llama 3.2 1B.
LLAMAS: Final = (
    LlamaSize(name="Llama 3 8B", config={"size": "3-8b"}, parameters=8.03),
    LlamaSize(name="Llama 3.2 1B", config={"size": "3.2-1b"}, parameters=1.24),
    LlamaSize(
        name="Llama 3.2 1B with 6 of its blocks and 32,000 words",
        config={"size": "3.2-1b", "blocks": 6, "vocabulary": 32000},
        parameters=0.43,
    ),
)
TOKENS: Final = 2048  # of a sample, on GPUs
ON_CPU: Final = {"size": "tiny", "vocabulary": 512, "width": 128, "inner": 256, "blocks": 6, "positions": 64}
QUICK: Final = {"size": "tiny"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSizes:
    """What is measured, and how long.

    workers: numbers of workers with a device each. worker_devices: devices of a single worker. warmup, least, most:
    steps before those that are measured, and of these at least and at most. seconds: after which no more than `least`
    are measured. kills: of workers. calm: steps between two of them.
    """

    model: BenchModel
    workers: tuple[int, ...]
    worker_devices: tuple[int, ...]
    warmup: int
    least: int
    most: int
    seconds: float
    kills: int
    calm: int

    @property
    def stages(self) -> int:
        """Of the grid on which prices are measured, and workers killed: at least two, else nobody keeps a copy."""
        return max(2, self.workers[-1])


def choose_sizes(machine: MachineFound, *, quick: bool) -> BenchSizes | str:
    """The sizes for that machine, or why nothing can be measured on it, in a sentence. quick: the smallest ones."""
    workers = worker_counts(len(machine.devices) if machine.is_gpu else machine.cpus)
    several = tuple(n for n in workers if 1 < n <= len(machine.devices)) if machine.is_gpu else (2,)
    if quick:
        model = bench_model("a tiny Llama", QUICK, samples=1, microbatches=4, tokens=16)
        return BenchSizes(
            model=model,
            workers=workers[:2],
            worker_devices=several[:1],
            warmup=2,
            least=3,
            most=4,
            seconds=1.0,
            kills=1,
            calm=2,
        )
    if not machine.is_gpu:
        model = bench_model("a small Llama", ON_CPU, samples=2, microbatches=2 * workers[-1], tokens=64)
    elif (size := largest(machine)) is not None:
        samples = 2 if min(one.memory for one in machine.devices) >= LARGE else 1
        microbatches = max(8, 2 * workers[-1])
        model = bench_model(
            size.name, size.config, samples=samples, microbatches=microbatches, tokens=TOKENS, precision="bf16"
        )
    else:
        least = LLAMAS[-1].parameters * GB * (OWNED + COPIED) + BESIDE
        return f"expected GPUs with at least {least / GB:.0f} GB of memory together, for {LLAMAS[-1].name}"
    return BenchSizes(
        model=model,
        workers=workers,
        worker_devices=several,
        warmup=4,
        least=4,
        most=20,
        seconds=20.0,
        kills=10,
        calm=4,
    )


def worker_counts(devices: int) -> tuple[int, ...]:
    """1, 2, 4 and 8, as many as there are devices for; two may share one, as else no copy and no loss is measured."""
    return tuple(n for n in (1, 2, 4, MOST_WORKERS) if n <= max(2, devices))


def largest(machine: MachineFound) -> LlamaSize | None:
    """The largest model of which one device has room for plain training, and all of them for stages and replicas."""
    alone = min(one.memory for one in machine.devices)
    there = alone * min(len(machine.devices), MOST_WORKERS)
    for size in LLAMAS:
        parameters = size.parameters * GB
        beside = BESIDE * min(len(machine.devices), MOST_WORKERS)
        if OWNED * parameters + BESIDE <= alone and (OWNED + COPIED) * parameters + beside <= there:
            return size
    return None


def bench_model(
    name: str, config: dict[str, Any], *, samples: int, microbatches: int, tokens: int, precision: str = "fp32"
) -> BenchModel:
    return BenchModel(
        name=name,
        entrypoint=ENTRYPOINT,
        config={**config, "data": {"length": tokens}},
        samples=samples,
        microbatches=microbatches,
        precision=precision,
        tokens=tokens,
    )
