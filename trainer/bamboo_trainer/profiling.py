"""Profiles of layers for `bamboo profile`: times measured on this machine's device, or work counted for another GPU.

`profile` measures one layer after the other, and repeats each until its medians are steady or a limit is reached. Each
layer is a stage of its own, run by the same code as in training, with the job's microbatch and precision. The earlier
layers make its inputs from the task's own data.

`layer_work`, for `bamboo profile --device`, counts the operations that a GPU would run for each layer's forward and
backward, without a GPU. `bamboo_trainer.tasks.inspection` adds them up to one number for each layer, its cost.
`layer_work` keeps the FLOPs and bytes of each operation, since its time depends on the device.
"""

import gc
import math
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from msgspec.structs import asdict
from torch.overrides import TorchFunctionMode

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from bamboo_trainer.check import result_or_problem
from bamboo_trainer.loading import settled_task
from bamboo_trainer.memory.estimate import LayerSize, checkpointed_layers, measure
from bamboo_trainer.memory.gpus import choose_device, use
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection import GRADIENT_TRAFFIC, Walk, first_batch, forward, layer_costs, look
from bamboo_trainer.tasks.mixed_precision import REDUCED, as_passed_on, autocast, rounded
from bamboo_trainer.tasks.operations import Kernel, Operations
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.tasks.user_code import run_layer, task_loss
from bamboo_trainer.training import TrainingConfig
from bamboo_trainer.worker.work_clock import WorkClock

FEWEST: Final = 5  # times, to know anything about their median
NOTCH: Final = 1.57  # times interquartile range / sqrt(n): half the interval of a median (McGill, 1978)
BOUND: Final = 0.03  # relative uncertainty of a median that is accepted
FLOOR: Final = 20e-6  # absolute uncertainty that is accepted, in seconds


def is_steady(times: Sequence[float]) -> bool:
    """Return whether the median of these times, in seconds, is known to within BOUND (relative) or FLOOR (absolute)."""
    off = spread(times)
    return off <= BOUND or off * statistics.median(times) <= FLOOR


def spread(times: Sequence[float]) -> float:
    """Return the relative uncertainty of the median of these times; infinite for too few times, or a median of 0."""
    if len(times) < FEWEST:
        return math.inf
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return NOTCH * (high - low) / math.sqrt(len(times)) / median if median > 0 else math.inf


WARMUP: Final = 2  # microbatches before those that count
REPEAT_SECONDS: Final = 60.0  # for measuring unsteady layers again, all layers together
MOST_ROUNDS: Final = 10
LOOPBACK_BYTES: Final = 64 << 20
LOOPBACK_SECONDS: Final = 30.0
WORKER: Final = "profile-0"


def profile(manifest: dict[str, Any], repeats: int, seconds: float = REPEAT_SECONDS) -> dict[str, Any]:
    """Measure a job's layers; return the figures below as JSON values, or {"problem": one sentence}.

    repeats: microbatches to measure in a round. While a layer's medians are not steady, more rounds of `repeats`
    follow, up to ten in all. All layers' further rounds together get about `seconds`. Raises ManifestError.

    layers: each layer's median seconds of forward, backward and update, bytes, and cost. device: GPU name or "cpu".
    load: seconds until the task was loaded. waited: share of the measuring time in which no processor was free; the
    layers' seconds exclude it. repeats: most microbatches measured for a layer. unsteady: layers whose medians never
    became steady; spread: relative uncertainty of the worst median, at most 1; bound: `BOUND`. loopback: bytes per
    second of a connection within this machine. memory: bytes of the device; None for a CPU.
    """
    began = time.monotonic()
    torch.set_num_threads(1)  # as in a worker
    spec = parse_manifest(manifest)
    return result_or_problem(lambda: _profile(spec, repeats, seconds, began) | {"loopback": loopback()})


def _profile(spec: JobSpec, repeats: int, seconds: float, began: float) -> dict[str, Any]:
    device = choose_device(WORKER)
    use(device, deterministic=spec.training.deterministic)
    task, spec = settled_task(spec)
    loaded = time.monotonic() - began
    sizes, costs = measure(task, spec), layer_costs(task, spec.training.micro_batch_size)
    clock, started = WorkClock(time.perf_counter), time.perf_counter()
    worked = clock()
    measured = _measured(task, spec, device, repeats, seconds, clock)
    took = time.perf_counter() - started
    return {
        "layers": [_figures(*each) for each in zip(measured, sizes, costs, strict=True)],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "load": loaded,
        "waited": max(0.0, 1 - (clock() - worked) / took),
        "repeats": max(len(one.forward) for one in measured),
        "unsteady": [index for index, one in enumerate(measured) if not one.is_steady],
        "spread": min(1.0, max(spread(times) for one in measured for times in (one.forward, one.backward))),
        "bound": BOUND,
    }


class LayerTimes(NamedTuple):
    """The times of one layer, in seconds: each microbatch's forward and backward, and each optimizer step."""

    forward: list[float]
    backward: list[float]
    update: list[float]

    @property
    def is_steady(self) -> bool:
        return is_steady(self.forward) and is_steady(self.backward)


def _figures(times: LayerTimes, size: LayerSize, cost: float) -> dict[str, Any]:
    medians = {kind: statistics.median(seconds) for kind, seconds in times._asdict().items()}
    return {**medians, **asdict(size.bytes), "cost": cost}


def _measured(
    task: Task, spec: JobSpec, device: torch.device, repeats: int, seconds: float, clock: WorkClock
) -> list[LayerTimes]:
    """Measure each layer as a stage of its own. seconds: for further rounds; the layers left share it equally."""
    count = len(task.layers)
    config = replace(TrainingConfig.of(spec.training), microbatches=WARMUP + repeats)
    stages = tuple((index, index + 1) for index in range(count))
    reader = BatchReader(task, config.samples)
    inputs: Parts | None = None
    measured, left = [], seconds
    try:
        for index in range(count):
            stage = build_stage(task, index, stages, config, device, reader)
            forward, backward, work, outputs = _round(clock, stage, config, inputs)
            began, share = time.monotonic(), left / (count - index)
            while (
                not (is_steady(forward) and is_steady(backward))
                and len(forward) < MOST_ROUNDS * repeats
                and time.monotonic() - began < share
            ):
                more, back, work, outputs = _round(clock, stage, config, inputs)
                forward += more
                backward += back
            left -= time.monotonic() - began
            measured.append(LayerTimes(forward, backward, _update(clock, stage, work, repeats)))
            inputs = outputs
            del stage, work
            gc.collect()  # a stage's parts refer to each other
    finally:
        reader.close()
    return measured


def _round(
    clock: WorkClock, stage: Stage, config: TrainingConfig, inputs: Parts | None
) -> tuple[list[float], list[float], Work, Parts]:
    """Run a stage's forwards and backwards of one step, without the update. Return the seconds of each forward and of
    each backward after the warm-up, the step's work, and the outputs of the last microbatch.
    """
    work = stage.begin(range(config.microbatches), (0, config.microbatches))
    forwards, backwards, outputs = [], [], None
    for microbatch in range(config.microbatches):
        forward, outputs = _timed(clock, stage, partial(stage.forward, work, 0, microbatch, inputs))
        forwards.append(forward)
        backwards.append(_backward(clock, stage, work, microbatch, outputs))
    assert outputs is not None
    return forwards[WARMUP:], backwards[WARMUP:], work, outputs


def _timed(clock: WorkClock, stage: Stage, what: Callable[[], Any]) -> tuple[float, Any]:
    stage.wait()
    began = clock()
    result = what()
    stage.wait()
    return clock() - began, result


def _backward(clock: WorkClock, stage: Stage, work: Work, microbatch: int, outputs: Parts) -> float:
    given = None if stage.values.last else tuple(torch.ones_like(part) for part in outputs if part.is_floating_point())
    return _timed(clock, stage, lambda: stage.backward(work, 0, microbatch, given))[0]


def _update(clock: WorkClock, stage: Stage, work: Work, repeats: int) -> list[float]:
    """Return the seconds of up to 5 optimizer steps, without a first one, which creates the optimizer's state."""
    values = stage.values
    gradient = work.gradients.total()[: values.size]
    times = [_timed(clock, stage, lambda: values.apply(gradient, 1.0))[0] for _ in range(1 + min(repeats, 5))]
    return times[1:]


def loopback() -> float:
    """Measure the bytes per second of a TCP connection within this machine. Raises OSError."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(LOOPBACK_SECONDS)
        sender = threading.Thread(target=_send, args=(server.getsockname()[1],), daemon=True)
        sender.start()
        received, buffer = 0, bytearray(1 << 20)
        connection, _ = server.accept()
        with closing(connection):
            connection.settimeout(LOOPBACK_SECONDS)
            began = time.perf_counter()
            while received < LOOPBACK_BYTES and (size := connection.recv_into(buffer)):
                received += size
            took = time.perf_counter() - began
        sender.join(LOOPBACK_SECONDS)
    return received / took


def _send(port: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), timeout=LOOPBACK_SECONDS)) as connection:
        connection.sendall(bytes(LOOPBACK_BYTES))


Row = tuple[str, int, int, int]  # the fields of a Kernel, and how often it is run


class LayerWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a layer for one microbatch. For the last layer it includes the loss. The backward includes adding
    the gradients to their sum and, for a checkpointed layer, a second forward.
    """

    forward: tuple[Row, ...]
    backward: tuple[Row, ...]


def count(manifest: dict[str, Any]) -> dict[str, Any]:
    """Count the work of each layer of a manifest's task. Return JSON values: {"problem": one sentence}, or {"layers":
    a list of objects with the fields of `bamboo.profiles.analytic.LayerCount`}. Raises ManifestError.
    """
    torch.set_num_threads(1)  # as in a worker
    spec = parse_manifest(manifest)
    return result_or_problem(lambda: {"layers": _layers(spec)})


def _layers(spec: JobSpec) -> list[dict[str, Any]]:
    task, spec = settled_task(spec)
    sizes, costs = measure(task, spec), layer_costs(task, spec.training.micro_batch_size)
    return [
        {**asdict(work), **asdict(size.bytes), "cost": cost}
        for work, size, cost in zip(layer_work(task, spec), sizes, costs, strict=True)
    ]


def layer_work(task: Task, spec: JobSpec) -> tuple[LayerWork, ...]:
    """Return every layer's work with the job's microbatch and precision. Raises TaskError for a layer that fails."""
    inputs, targets = first_batch(task, spec.training.micro_batch_size)
    return look(task, inputs, partial(_work, TrainingConfig.of(spec.training), targets))


def _work(config: TrainingConfig, targets: Parts, walk: Walk, index: int, inputs: Parts) -> tuple[LayerWork, Parts]:
    task, layer = walk.task, rounded(walk.layer(index), config.parameter_dtype)
    forwards, backward = Operations(), Operations()
    with walk.within:
        given = as_passed_on(inputs)
        with walk.quickly, FusedOperations(), autocast(torch.device("cpu"), config.precision):
            if config.precision in REDUCED:  # parameters are cast once a step, and not for each microbatch
                run_layer(layer, index, given)
            with forwards:
                parts = forward(task, config, index, layer, given)
        ends = [p for p in parts if p.requires_grad]
        if index == len(task.layers) - 1:
            with walk.quickly, FusedOperations(), forwards:
                ends = [loss for loss in [task_loss(task, parts, walk.given(targets)).total] if loss.requires_grad]
        with backward:
            if ends:
                torch.autograd.backward(ends, [torch.empty_like(p) for p in ends])
    backwards = backward.kernels + (forwards.kernels if index in checkpointed_layers(task) and ends else Counter())
    if trained := sum(p.numel() for p in layer.parameters() if p.requires_grad):
        backwards[Kernel("fp32", 0, GRADIENT_TRAFFIC * trained)] += 1
    return LayerWork(forward=_rows(forwards.kernels), backward=_rows(backwards)), parts


def _rows(kernels: Counter[Kernel]) -> tuple[Row, ...]:
    return tuple((*kernel, times) for kernel, times in sorted(kernels.items()))


class FusedOperations(TorchFunctionMode):
    """A torch mode that replaces attention and dropout by the fused operations that a GPU would run: on a CPU each is
    several operations. Attention runs without its mask and dropout. The outputs have the same shapes and dtypes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | given
            grouped: dict[str, Any] = {"enable_gqa": True} if named.get("enable_gqa") else {}
            return func(named["query"], named["key"], named["value"], **grouped)
        if func in (F.dropout, torch.dropout):
            named = dict(zip(("input", "p", "training"), args, strict=False)) | given
            rate, trains = named.get("p", 0.5), named.get("training", named.get("train", True))
            if rate and trains and not named.get("inplace") and named["input"].is_floating_point():
                return torch.native_dropout(named["input"], rate, True)[0]
        return func(*args, **given)
