"""The choice of what is measured: Llamas that fit into this machine, and the grids that they are trained on. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bamboo.bench.report import BenchModel, MachineFound

GB: Final = 10**9
ENTRYPOINT: Final = "bamboo_trainer.models.llama:build"
MOST_WORKERS: Final = 8
# Bytes of a parameter: fp32 values, gradients and two averages, and in bf16 the casts; a replica has no casts.
OWNED, COPIED = 18, 16
LOGITS: Final = 12  # bytes of each of a microbatch's, while the loss is computed
LOGITS_KEPT: Final = 1.6  # by which the last stage keeps more than others, of each
BESIDE: Final = 2 * GB  # torch's own, of each worker
USABLE: Final = 0.95  # of a device's memory: the allocator leaves gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSize:
    """A Llama that may be measured. Figures are of its own configuration, as `bamboo validate --load` estimates them.

    parameters: of all of it. embedding: of the layer that has most. kept: bytes that a token's backward needs, of all
    layers.
    """

    name: str
    config: dict[str, Any]
    parameters: float
    embedding: float
    vocabulary: int
    kept: float


LARGE: Final = LlamaSize(
    name="Llama 3 8B",
    config={"size": "3-8b"},
    parameters=8.03e9,
    embedding=0.53e9,
    vocabulary=128256,
    kept=8.57e6,
)
# The larger first. Each block of those with few is one of Llama 3.2 1B: for small GPUs.
USUAL: Final = (
    LlamaSize(
        name="Llama 3.2 1B",
        config={"size": "3.2-1b"},
        parameters=1.24e9,
        embedding=0.27e9,
        vocabulary=128256,
        kept=2.67e6,
    ),
    LlamaSize(
        name="Llama 3.2 1B with 6 of its blocks and 32,000 words",
        config={"size": "3.2-1b", "blocks": 6, "vocabulary": 32000},
        parameters=0.43e9,
        embedding=0.07e9,
        vocabulary=32000,
        kept=0.95e6,
    ),
    LlamaSize(
        name="Llama 3.2 1B with 4 of its blocks and 32,000 words",
        config={"size": "3.2-1b", "blocks": 4, "vocabulary": 32000},
        parameters=0.31e9,
        embedding=0.07e9,
        vocabulary=32000,
        kept=0.68e6,
    ),
)
ON_CPU: Final = LlamaSize(
    name="a small Llama",
    config={"size": "tiny", "vocabulary": 512, "width": 128, "inner": 256, "blocks": 6, "positions": 64},
    parameters=1.1e6,
    embedding=0.07e6,
    vocabulary=512,
    kept=5e4,
)
TINY: Final = LlamaSize(
    name="a tiny Llama", config={"size": "tiny"}, parameters=1e5, embedding=2e4, vocabulary=256, kept=1e4
)
TOKENS: Final = 2048  # of a sample, on GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A way to train a model on this machine, as far as memory goes. stages: of a pipeline. pipelines: how many.
    sharing: workers that share a device. replicated: each worker keeps a replica of the next one's stage. eager: and
    computes its forwards in advance. postpones: weight gradients are computed late.
    """

    stages: int = 1
    pipelines: int = 1
    sharing: int = 1
    replicated: bool = False
    eager: bool = False
    postpones: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model and its job's sizes."""

    size: LlamaSize
    model: BenchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSizes:
    """What is measured, and how long.

    usual: the model of all parts but one. larger: that of the part `larger`, if there is room for one; why_none_larger:
    a sentence if there is not. workers: numbers of workers with a device each. worker_devices: devices of a single
    worker. warmup, least, most: steps before those that are measured, and of these at least and at most. seconds: after
    which no more than `least` are measured. kills: of workers. calm: steps between two of them.
    """

    usual: MeasuredModel
    larger: MeasuredModel | None = None
    why_none_larger: str = ""
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
        """How many stages the grid has on which prices are measured, and workers killed: at least two, else nobody
        keeps a copy.
        """
        return max(2, self.workers[-1])


def choose_sizes(machine: MachineFound, *, quick: bool) -> BenchSizes | str:
    """The sizes for that machine, or why nothing can be measured on it, in a sentence. quick: the smallest ones."""
    workers = worker_counts(len(machine.devices) if machine.is_gpu else machine.cpus)
    several = tuple(n for n in workers if 1 < n <= len(machine.devices)) if machine.is_gpu else (2,)
    if quick:
        usual = _sized(TINY, samples=1, microbatches=4, tokens=16)
        return BenchSizes(
            usual=usual,
            why_none_larger="with --quick no larger model is measured",
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
        return _of(
            _sized(ON_CPU, samples=2, microbatches=2 * workers[-1], tokens=64),
            workers,
            several,
            why_none_larger="a larger model is measured on GPUs",
            seconds=20.0,
        )
    microbatches = max(8, 2 * workers[-1])
    stages, sharing = max(2, workers[-1]), max(1, 2 // len(machine.devices))
    loads = (Load(), Load(stages=stages, sharing=sharing, replicated=True))
    usual_one = _first_that_fits(machine, USUAL, loads, microbatches)
    if usual_one is None:
        least = max(needed(USUAL[-1], 1, TOKENS, load) for load in loads) / USABLE
        return f"expected GPUs with at least {least / GB:.0f} GB of memory each, for {USUAL[-1].name}"
    alone, spread = Load(), Load(stages=stages, sharing=sharing)
    above = [size for size in (LARGE, *USUAL) if size.parameters > usual_one.size.parameters]
    ways = [(size, load) for size in above for load in (alone, spread)]
    found = (_first_that_fits(machine, (size,), (load,), microbatches) for size, load in ways)
    larger = next((one for one in found if one is not None), None)
    why = "" if larger else f"{above[-1].name}: {lacks_memory(machine, above[-1], 1, TOKENS, spread)}"
    return _of(usual_one, workers, several, larger=larger, why_none_larger=why, seconds=10.0)


def _of(usual: MeasuredModel, workers: tuple[int, ...], several: tuple[int, ...], **more: Any) -> BenchSizes:
    return BenchSizes(
        usual=usual, workers=workers, worker_devices=several, warmup=4, least=4, most=20, kills=10, calm=4, **more
    )


def worker_counts(devices: int) -> tuple[int, ...]:
    """1, 2, 4 and 8, as many as there are devices for; two may share one, as else no copy and no loss is measured."""
    return tuple(n for n in (1, 2, 4, MOST_WORKERS) if n <= max(2, devices))


def _first_that_fits(
    machine: MachineFound, those: Sequence[LlamaSize], loads: Sequence[Load], microbatches: int
) -> MeasuredModel | None:
    """The first one for which a device has room in all these ways, with as many samples in a microbatch as then fit."""
    for size in those:
        for samples in (2, 1):
            if not any(lacks_memory(machine, size, samples, TOKENS, load) for load in loads):
                return _sized(size, samples=samples, microbatches=microbatches, tokens=TOKENS, precision="bf16")
    return None


def lacks_memory(machine: MachineFound, size: LlamaSize, samples: int, tokens: int, load: Load) -> str:
    """Why the devices have no room for that, in a sentence; "" if they have."""
    there, wanted = min(one.memory for one in machine.devices), needed(size, samples, tokens, load)
    if not machine.is_gpu or wanted <= USABLE * there:
        return ""
    return f"it takes about {wanted / GB:.0f} GB of a device, which has {there / GB:.0f}"


def needed(size: LlamaSize, samples: int, tokens: int, load: Load) -> float:
    """About as many bytes as the device takes that needs most. samples: of a microbatch; tokens: of a sample."""
    each = samples * tokens * size.kept  # of a microbatch, in all layers
    logits = samples * tokens * size.vocabulary
    if load.sharing > 1:  # all workers are on one device, some of several pipelines
        times = load.sharing / load.stages
        copied = size.parameters + (size.embedding if load.stages > 1 else 0)  # the last stage may have it, too
        parameters, whole = times * copied, float(load.sharing)
    elif load.stages > 1:
        parameters = copied = size.parameters / load.stages + size.embedding
        whole = (2 * load.stages - 1) / load.stages  # the first stage runs so far ahead
    else:
        parameters, copied, whole = size.parameters, 0.0, 1.0
    kept = each * whole
    if load.postpones:
        kept += logits * LOGITS_KEPT * (2 * load.stages - 1)
    state = OWNED * parameters + (COPIED * copied if load.replicated else 0)
    if load.pipelines > 1:
        state += (
            2 * 8 * size.parameters * load.sharing
        )  # sums of gradients that do not depend on the grid, and their parts sent
    return state + kept * (2 if load.eager else 1) + LOGITS * logits + BESIDE * load.sharing


def _sized(size: LlamaSize, *, samples: int, microbatches: int, tokens: int, precision: str = "fp32") -> MeasuredModel:
    model = BenchModel(
        name=size.name,
        entrypoint=ENTRYPOINT,
        config={**size.config, "data": {"length": tokens}},
        samples=samples,
        microbatches=microbatches,
        precision=precision,
        tokens=tokens,
    )
    return MeasuredModel(size=size, model=model)


def tiny_model() -> MeasuredModel:
    """The model of checks, on any machine."""
    return _sized(TINY, samples=2, microbatches=4, tokens=16)
