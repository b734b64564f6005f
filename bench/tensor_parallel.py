"""When is a layer divided over the devices of a worker faster than consecutive stages on them?

    python bench/tensor_parallel.py [--machine h100] [--hidden 0.5] [--schedule ZBH1] [--json FILE]

Arithmetic, no processes; see docs/design/tensor-parallel.md. Both forms train the same model on as many workers of 8
devices, with a million tokens in a pipeline's step, in microbatches of one, two or four samples, whatever is fastest.
Both are split by the planner's own function, and keep only the inputs of as many layers for the backward as memory asks
for. Stages may also take a sequence in pieces, one after the other; all pieces count as equally long, though attention
makes later ones longer.

A divided layer exchanges slices of its activations ten times a microbatch: two gathers and two sums in its forward, as
many in its backward, and two gathers of inputs that weight gradients need once more.

What is not counted is what both do alike: boundaries between workers, reductions, SYNC, the optimizer.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from _common import show, write_json
from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.grid import split_layers

DEVICES = 8  # of a worker
TOKENS_OF_STEP = 2**20  # of one pipeline
SAMPLES = (1, 2, 4)  # of a microbatch
PIECES = (1, 2, 4, 8)  # of a sequence
TOKENS_OF_PIECE = 1024  # at least
BYTES = 2  # of a number that is sent or kept
STATE_BYTES = 26  # of a parameter: 22 of its owner, 4 of a replica, whose optimizer state is in host memory
SHARE_OF_PEAK = 0.4  # that a layer's forward and backward reach, as in docs/design/devices.md
USABLE = 0.9  # of a device's memory
USUAL_TOKENS = 8192  # of a microbatch that reaches that share
TILE = 128  # rows and columns of a product's result that one multiprocessor computes at a time
GATHERS, SUMS = 6, 4  # of a divided layer's forward and backward
MOST_SAMPLES = 4096  # of a step
NOT = "–"
SEQUENCES = (2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer with grouped queries and a gated MLP, as published."""

    name: str
    workers: int  # of a pipeline
    layers: int
    width: int
    inner: int  # width of the MLP
    keys: int  # width of all keys
    vocabulary: int

    @property
    def weights(self) -> int:
        """Parameters of a layer."""
        return self.width * (2 * self.width + 2 * self.keys + 3 * self.inner)

    def forward(self, sequence: int) -> tuple[float, float]:
        """Operations of a layer for a token: of products with weights, and of causal attention."""
        return 2.0 * self.weights, 2.0 * sequence * self.width

    @property
    def kept(self) -> int:
        """Bytes of a token that a layer keeps for its backward: what autograd saves, with fused attention."""
        return BYTES * (6 * self.width + 2 * self.keys + 4 * self.inner)

    def products(self, parts: int) -> tuple[tuple[int, int], ...]:
        """Width of the inputs and outputs of each product with weights that one of so many devices computes."""
        return (
            (self.width, (self.width + 2 * self.keys) // parts),
            (self.width // parts, self.width),
            (self.width, 2 * self.inner // parts),
            (self.inner // parts, self.width),
        )


MODELS = (  # on numbers of workers over which whole layers divide well
    Model(name="8B", workers=2, layers=32, width=4096, inner=14336, keys=1024, vocabulary=128256),  # Llama 3
    Model(name="13B", workers=2, layers=40, width=5120, inner=13824, keys=5120, vocabulary=32000),  # Llama 2
    Model(name="32B", workers=3, layers=64, width=5120, inner=27648, keys=1024, vocabulary=152064),  # Qwen 2.5
    Model(name="70B", workers=6, layers=80, width=8192, inner=28672, keys=1024, vocabulary=128256),  # Llama 3
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Eight devices of a node. Rates are in operations and bytes a second; `link` is of a device, one way."""

    name: str
    peak: float  # of products in bf16
    multiprocessors: int
    memory: float
    bandwidth: float
    link: float
    latency: float  # seconds of an exchange of nothing, assumed


MACHINES = {  # peaks, memory and bandwidths: client/bamboo/profiles/devices.json; B200: data sheet (2024)
    "a100-pcie": Machine(
        name="A100, PCIe 4",
        peak=312e12,
        multiprocessors=108,
        memory=80e9,
        bandwidth=1.85e12,
        link=25e9,  # half of the rate of PCIe 5 in docs/design/devices.md
        latency=30e-6,
    ),
    "h100": Machine(
        name="H100, NVLink 4",
        peak=989e12,
        multiprocessors=132,
        memory=80e9,
        bandwidth=3.06e12,
        link=360e9,  # of 450, as in docs/design/devices.md
        latency=15e-6,
    ),
    "b200": Machine(
        name="B200, NVLink 5",
        peak=2250e12,
        multiprocessors=148,
        memory=180e9,
        bandwidth=7.3e12,
        link=720e9,
        latency=15e-6,
    ),
}


class Load(NamedTuple):
    """Microbatches of a model on a machine. hidden: share of the exchanges that computation hides.

    pieces: of each sequence, that pass through the stages one after the other.
    """

    model: Model
    machine: Machine
    sequence: int
    hidden: float
    samples: int = 1
    pieces: int = 1

    @property
    def tokens(self) -> int:
        return self.sequence * self.samples // self.pieces

    def seconds(self, operations: float) -> float:
        """Of operations for a token, on one device."""
        return operations * self.tokens / (self.machine.peak * SHARE_OF_PEAK)


class LayerTimes(NamedTuple):
    """Seconds of a microbatch in one layer."""

    forward: float
    backward: float
    exchanged: float  # a part of both
    again: float  # a forward that is repeated for the backward


def layer_times(load: Load, parts: int) -> LayerTimes:
    """The layer is divided over so many devices."""
    products, attention = load.model.forward(load.sequence)
    slower = wave_loss(load, parts) / parts
    forward = load.seconds(slower * products + attention / parts)
    backward = load.seconds(2 * slower * products + 2.5 * attention / parts)
    gather, total = exchange_seconds(load, parts)
    exchanged = GATHERS * gather + SUMS * total
    forward_exchanged = 2 * gather + 2 * total
    return LayerTimes(
        forward + forward_exchanged,
        backward + exchanged - forward_exchanged,
        exchanged,
        forward + total,  # its gathers take the place of those for weight gradients, its last sum is not needed
    )


def exchange_seconds(load: Load, parts: int) -> tuple[float, float]:
    """A gather of all devices' slices, and a sum of their partial results in the order of ranks."""
    if parts == 1:
        return 0.0, 0.0
    size, machine = load.tokens * load.model.width * BYTES, load.machine
    moved = size * (parts - 1) / parts / machine.link + machine.latency
    added = size * (parts + 1) / parts / machine.bandwidth
    return (1 - load.hidden) * moved, (1 - load.hidden) * moved + added


def wave_loss(load: Load, parts: int) -> float:
    """How much longer products take for an operation than usual, since the last tiles do not fill the device."""

    def taken(count: int, tokens: int) -> float:
        total = 0.0
        for inputs, outputs in load.model.products(count):
            for rows, columns in ((tokens, outputs), (tokens, inputs), (inputs, outputs)):
                tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
                waves = tiles / load.machine.multiprocessors
                total += inputs * outputs * math.ceil(waves) / waves
        return total * count

    return taken(parts, load.tokens) / taken(1, USUAL_TOKENS)


class Form(NamedTuple):
    """How a step runs."""

    load: Load
    seconds: float
    idle: float  # share of the step: bubbles, and that whole layers do not divide evenly
    recomputed: float  # share of the layers that keep only their inputs, on the device where it is greatest


def fastest(
    load: Load, parts: int, samples: int, schedule: PipelineSchedule, *, in_pieces: bool = False
) -> Form | None:
    """With the best microbatches. samples: of a step. in_pieces: sequences may be cut. None if no form fits."""
    loads = [load._replace(samples=size) for size in SAMPLES if size <= samples]
    if in_pieces:
        most = load.sequence // TOKENS_OF_PIECE
        loads = [each._replace(pieces=pieces) for each in loads for pieces in PIECES if pieces <= most]
    found = (form(each, parts, samples // each.samples, schedule) for each in loads)
    return min((one for one in found if one), key=lambda one: one.seconds, default=None)


def form(load: Load, parts: int, microbatches: int, schedule: PipelineSchedule) -> Form | None:
    """Stages of one device each (parts 1), or layers that are divided over all devices of a worker.

    None if memory is not even enough for the inputs of layers.
    """
    model, count = load.model, load.model.workers * DEVICES // parts
    microbatches *= load.pieces
    times = layer_times(load, parts)
    layer, head = times.forward + times.backward, head_seconds(load, parts)
    taken, recomputed = [], 0.0
    # the embedding computes nothing, but has its memory
    for number, (first, end) in enumerate(split_layers([layer] * (model.layers + 1) + [head], count)):
        layers = min(end, model.layers + 1) - max(first, 1)
        tables = (first == 0) + (end == model.layers + 2)
        state = STATE_BYTES * (layers * model.weights + tables * model.width * model.vocabulary) / parts
        later = 0 if schedule is PipelineSchedule.ZB_H1 else number
        flying = min(microbatches, count - later + load.pieces - 1)  # backwards begin with a sequence's last piece
        share = _recomputed(load, parts, load.machine.memory * USABLE - state, layers, flying)
        if share is None:
            return None
        last = head if end == model.layers + 2 else 0.0
        taken.append(layers * (layer + share * times.again) + last)
        recomputed = max(recomputed, share)
    rest = sum(taken) - max(taken)
    seconds = microbatches * max(taken) + rest / (3 if schedule is PipelineSchedule.ZB_H1 else 1)
    return Form(load, seconds, 1 - microbatches * sum(taken) / count / seconds, recomputed)


def head_seconds(load: Load, parts: int) -> float:
    """Of a microbatch in the product with the vocabulary, whose inputs are gathered, and their gradients summed."""
    return load.seconds(6.0 * load.model.width * load.model.vocabulary) / parts + sum(exchange_seconds(load, parts))


def _recomputed(load: Load, parts: int, room: float, layers: int, flying: int) -> float | None:
    """Share of the layers that have to keep only their inputs; None if that is not enough."""
    full, least = (load.tokens * each / parts for each in (load.model.kept, BYTES * load.model.width))
    if layers * flying * full <= room:
        return 0.0
    left = room - full - layers * flying * least  # one layer's are there while it is run again
    return None if left < 0 else 1 - left / (layers * flying * (full - least))


def even_at(load: Load, schedule: PipelineSchedule) -> int | None:
    """The fewest samples of a step, of powers of two, with which stages are as fast; None if they never are."""
    samples = 1
    while samples <= MOST_SAMPLES:
        stages, divided = (fastest(load, parts, samples, schedule) for parts in (1, DEVICES))
        if stages and (divided is None or stages.seconds <= divided.seconds):
            return samples
        samples *= 2
    return None


def row(load: Load, schedule: PipelineSchedule) -> list[str]:
    """Of the table that the docs show."""
    samples = TOKENS_OF_STEP // load.sequence
    stages, divided = (fastest(load, parts, samples, schedule) for parts in (1, DEVICES))
    assert divided is not None, "a divided layer has an eighth of the activations of a stage"
    whole, part = (layer_times(divided.load, parts) for parts in (1, DEVICES))
    more = (part.forward + part.backward) * DEVICES / (whole.forward + whole.backward) - 1
    return [
        f"{load.model.name}, {load.model.workers}",
        f"{load.sequence // 1024}k",
        _percent(more),
        ", ".join(_percent(one.recomputed) if one else NOT for one in (stages, divided)),
        ", ".join(_percent(one.idle) if one else NOT for one in (stages, divided)),
        _speed(stages, divided),
        _speed(fastest(load, 1, samples, schedule, in_pieces=True), divided),
        str(even_at(load, schedule) or NOT),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _speed(other: Form | None, divided: Form) -> str:
    """Of divided layers, over another form that may not fit."""
    return f"{other.seconds / divided.seconds:.2f}" if other else "fits"


COLUMNS = (
    "Model, workers",
    "Sequence",
    "Costs more",
    "Run again",
    "Idle",
    "/ stages",
    "/ pieces",
    "Samples for stages",
)


def rows(machine: Machine, hidden: float, schedule: PipelineSchedule) -> list[list[str]]:
    return [row(Load(model, machine, sequence, hidden), schedule) for model in MODELS for sequence in SEQUENCES]


def run(
    machine: Annotated[str, typer.Option(help=f"One of {', '.join(MACHINES)}.")] = "h100",
    hidden: Annotated[float, typer.Option(min=0, max=1, help="Share of exchanges that computation hides.")] = 0.0,
    schedule: Annotated[PipelineSchedule, typer.Option(help="Of the pipeline.")] = PipelineSchedule.ONE_F_ONE_B,
    json: Annotated[Path | None, typer.Option(help='Write the table to this file, or to "-".')] = None,
) -> None:
    """Print both forms side by side; where there are two figures the first one is of stages.

    Costs more: a divided layer, than an undivided one. Run again: layers whose forward is repeated for want of memory,
    on the device that repeats most. Idle: bubbles, and layers that do not divide evenly. / stages, / pieces: speed of
    divided layers over stages, of whole sequences or of up to eight pieces of each; "fits" where only divided layers
    have the memory. Samples for stages: of a step, with
    which stages are as fast.
    """
    if machine not in MACHINES:
        raise typer.BadParameter(f"expected one of {', '.join(MACHINES)}, got {machine}", param_hint="--machine")
    found = rows(MACHINES[machine], hidden, schedule)
    if str(json) != "-":
        show(f"{MACHINES[machine].name}, {schedule}, {_percent(hidden)} of exchanges hidden", COLUMNS, found)
    write_json(json, {"machine": machine, "hidden": hidden, "schedule": schedule, "columns": COLUMNS, "rows": found})


if __name__ == "__main__":
    typer.run(run)
