"""Estimates of the memory that workers need, from the sizes of layers. Pure.

`device_peak` is the only count of a device's memory: for `bamboo plan` from a profile, for the coordinator's grids from
sizes that workers report, for `bamboo validate --load` from the task (`bamboo_trainer.memory.estimate`).

`fitting_split` searches for the fastest split of the layers over stages that fits into memory. A fast stage may be
large in memory: a wide embedding, or the first stages, which keep the most microbatches in flight. A worker's need also
depends on its neighbours' stages, as it keeps their replicas and may have to run them. So the search tries limits for
the bytes of a stage and its own replicas, by bisection. For each limit it finds the split whose longest stage takes the
least time; `most_bytes` then decides whether all workers fit.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final, Self

from bamboo_core.job.spec import JobSpec, RedundancyMode, ReplicaPlacement, in_force
from bamboo_core.job.training_spec import ParameterPrecision, Precision
from bamboo_core.planning.gradient_groups import most_microbatches
from bamboo_core.planning.grid import Roles, layer_ranges, worker_roles
from bamboo_core.planning.profile import Layer, LayerBytes, ModelFigures, ModelProfile
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.splits.device_stages import device_layers, device_roles
from bamboo_core.planning.splits.speeds import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """The bytes of a stage on a device.

    casts: copies of the parameters in the precision of matrix products, except for layers with activation
    checkpointing, whose casts exist only while they run. gradients: size of one gradient sum. largest: the largest
    layer's part of that sum. in_flight: data kept for microbatches in flight, normally and after a takeover.
    """

    parameters: int
    casts: int
    optimizer: int
    gradients: int
    largest: int
    in_flight: tuple[int, int]


def stage_bytes(
    spec: JobSpec, place: tuple[int, int], layers: Sequence[Layer] | Sequence[LayerBytes], *, inputs: int, casts: int
) -> StageBytes:
    """Return the bytes of a stage. place: the stage, and the number of stages. inputs: bytes of the first layer's
    inputs per microbatch. casts: see `StageBytes`. The stage's output counts only if its last layer keeps activations,
    since only then may the stage hold it until the backward.
    """
    microbatches = most_microbatches(spec.training, spec.topology.pipelines)
    outputs = sum(layer.boundary for layer in layers[:-1]) + (layers[-1].boundary if layers[-1].activations else 0)
    of_one = inputs + outputs + sum(layer.activations for layer in layers)
    order = StageOrder.of(spec.topology)
    return StageBytes(
        parameters=sum(layer.parameters for layer in layers),
        casts=casts,
        optimizer=sum(layer.optimizer for layer in layers),
        gradients=sum(layer.gradients for layer in layers),
        largest=max((layer.gradients for layer in layers), default=0),
        in_flight=(
            order.in_flight(*place, microbatches) * of_one,
            order.taken_over().in_flight(*place, microbatches) * of_one,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """The bytes of a device, by kind. parameters: with their casts. replica: the states of stages kept for others."""

    parameters: int
    optimizer: int
    replica: int
    gradients: int
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.replica + self.gradients + self.activations


def device_peak(spec: JobSpec, roles: Roles, stage: Callable[[int], StageBytes]) -> DeviceBytes:
    """Return a device's bytes at the moment of its largest need. stage: returns the bytes of a stage.

    While it computes, each of its cells has one gradient sum: sums of further finished groups wait in host memory if
    there is no room. In 16 bits a running layer also has casts, and gradients that are cast back. Meanwhile a replica
    may be updated, which needs its final gradient, and the optimizer's state if that is in host memory. In the device's
    own update the casts are gone, and the cells of a stage have one final gradient; clipping or unscaling adds a copy
    for one stage. A device that runs several cells has the optimizer's state of one stage while it updates that.
    """
    cells, states, kept = ([stage(s) for s in some] for some in (roles.owned, roles.states, roles.kept))
    on_host, several = spec.redundancy.placement is ReplicaPlacement.HOST, len(cells) > 1
    training = spec.training
    parameters, casts = sum(one.parameters for one in states), sum(one.casts for one in states)
    sums = sum(one.gradients for one in cells)
    optimizers = [one.optimizer for one in states] or [0]
    largest = max((one.gradients for one in states), default=0)
    replica = sum(one.parameters + (0 if on_host else one.optimizer) for one in kept)
    updated = max((one.optimizer for one in kept), default=0) if on_host else 0
    cast_back = 0 if training.precision is Precision.FP32 else max((one.largest for one in cells), default=0)
    scales = training.max_gradient_norm is not None or training.precision is Precision.FP16
    computing = DeviceBytes(
        parameters=parameters + casts,
        optimizer=0 if several else optimizers[0],
        replica=replica + updated,
        gradients=sums + cast_back + max((one.gradients for one in kept), default=0),
        activations=sum(one.in_flight[s in roles.taken_over] for s, one in zip(roles.owned, cells, strict=True)),
    )
    updating = DeviceBytes(
        parameters=parameters,
        optimizer=max(optimizers),
        replica=replica,
        gradients=sum(one.gradients for one in states) + (largest if scales else 0),
    )
    return max(computing, updating, key=lambda moment: moment.total)


def device_bytes(figures: ModelFigures, spec: JobSpec, *, taken_over: bool, split: Ranges | None = None) -> int:
    """Return the bytes of the device that needs most. taken_over: after losses, when its worker also runs lost workers'
    stages. split: the layers of each stage; None: as `layer_ranges` splits them, which may raise ValueError.
    """
    spec, devices = in_force(spec), spec.worker.devices
    stages = split or layer_ranges(figures.costs, spec.topology, devices=devices)
    ranges = device_layers(spec, stages, figures.costs) or stages
    roles = worker_roles(spec, len(stages), taken_over=taken_over)
    return max(_of(figures, spec, ranges, device_roles(one, at, devices)) for one in roles for at in range(devices))


def spare_bytes(
    figures: ModelFigures, spec: JobSpec, stages: tuple[tuple[int, int], ...], kept: tuple[int, ...]
) -> int:
    """Return the bytes of the device that needs most in a spare worker with replicas of the stages `kept`. stages: the
    layers of each stage.
    """
    devices = spec.worker.devices
    ranges = device_layers(spec, stages, figures.costs) or stages
    roles = Roles(stage=None, owned=(), kept=kept)
    return max(_of(figures, spec, ranges, device_roles(roles, at, devices)) for at in range(devices))


def most_bytes(figures: ModelFigures, spec: JobSpec, split: Ranges | None = None) -> int:
    """Return the bytes of the device that needs most at any time, including takeovers."""
    return max(device_bytes(figures, spec, taken_over=over, split=split) for over in (False, True))


def _of(figures: ModelFigures, spec: JobSpec, ranges: Sequence[tuple[int, int]], roles: Roles) -> int:
    training = spec.training
    has_casts = training.precision is not Precision.FP32 and training.parameter_precision is ParameterPrecision.FP32

    def stage(s: int) -> StageBytes:
        """Return a stage's bytes. Layers without activations (checkpointed, or no matrix products) keep no casts."""
        layers = figures.layers[slice(*ranges[s])]
        casts = sum(layer.parameters // 2 for layer in layers if layer.activations) if has_casts else 0
        inputs = figures.layers[ranges[s][0] - 1].boundary if s else 0
        return stage_bytes(spec, (s, len(ranges)), layers, inputs=inputs, casts=casts)

    return device_peak(spec, roles, stage).total


def memory_warning(profile: ModelProfile, spec: JobSpec) -> str:
    """Return a warning that a worker's memory may not suffice; "" if it suffices, or if the job is elastic, as the
    coordinator then chooses only grids that fit.
    """
    if spec.elastic:
        return ""
    asked, memory = spec.redundancy, profile.machine.memory
    siblings = asked.mode is RedundancyMode.AUTO and spec.topology.pipelines > asked.kept
    if siblings and most_bytes(profile.figures, spec) > memory:
        spec = replace(spec, redundancy=replace(asked, mode=RedundancyMode.NONE))
    one = "worker" if spec.worker.devices == 1 else "device of a worker"
    for taken_over, when in ((False, ""), (True, " while it runs a lost neighbour's stage, too")):
        needed = device_bytes(profile.figures, spec, taken_over=taken_over)
        if needed > memory:
            available = f"{memory / 1e9:.1f} GB"
            return f"a {one} needs about {needed / 1e9:.1f} GB{when}, and a machine of the profile has {available}"
    return ""


SHARES: Final = 12  # shares of memory to try, by bisection
PRECISION: Final = 1e-6  # relative, of the longest stage's seconds and of the largest load


def fitting_split(figures: ModelFigures, spec: JobSpec, memory: int) -> Ranges | None:
    """Return the layers of each stage so that all workers fit into `memory` bytes per device; None if no split is
    found.

    A split in the manifest is the only candidate. Without one, the split by costs is the first candidate, and the only
    one if workers have several devices. Raises ValueError as `layer_ranges` does.
    """
    spec = in_force(spec)
    usual = layer_ranges(figures.costs, spec.topology, devices=spec.worker.devices)
    if most_bytes(figures, spec, usual) <= memory:
        return usual
    if spec.topology.split is not None or spec.worker.devices > 1 or len(usual) == 1:
        return None
    loads = _Loads.of(figures, spec)
    best, low, high = None, loads.least(), loads.largest(usual)
    share = low
    for _ in range(SHARES):
        split = loads.fastest(share)
        if split is not None and most_bytes(figures, spec, split) <= memory:
            best, low = split, share
        elif best is None:
            return None
        else:
            high = share
        share = (low + high) / 2
    return best


@dataclass(frozen=True, slots=True)
class _Loads:
    """Prefix sums over layers, from which the time and memory of any stage follow. costs: as in `ModelFigures`. fixed:
    bytes that do not depend on microbatches (parameters, optimizer, gradients, replicas). flying: bytes of activations
    and outputs per microbatch in flight. All three have layers + 1 values. counts: microbatches in flight, by stage.
    """

    costs: Sequence[float]
    fixed: Sequence[float]
    flying: Sequence[float]
    counts: Sequence[int]

    @classmethod
    def of(cls, figures: ModelFigures, spec: JobSpec) -> Self:
        copies, on_host = spec.redundancy.kept, spec.redundancy.placement is ReplicaPlacement.HOST
        fixed = [
            layer.parameters
            + layer.optimizer
            + layer.gradients
            + copies * (layer.parameters + (0 if on_host else layer.optimizer))
            for layer in figures.layers
        ]
        flying = [layer.activations + layer.boundary for layer in figures.layers]
        depth, microbatches = spec.topology.stages, most_microbatches(spec.training, spec.topology.pipelines)
        order = StageOrder.of(spec.topology)
        counts = [order.in_flight(stage, depth, microbatches) for stage in range(depth)]
        summed = [list(accumulate(each, initial=0.0)) for each in (figures.costs, fixed, flying)]
        return cls(costs=summed[0], fixed=summed[1], flying=summed[2], counts=counts)

    def load(self, stage: int, first: int, end: int) -> float:
        """Return the bytes of a stage with these layers."""
        return self.fixed[end] - self.fixed[first] + self.counts[stage] * (self.flying[end] - self.flying[first])

    def largest(self, split: Ranges) -> float:
        return max(self.load(stage, *layers) for stage, layers in enumerate(split))

    def least(self) -> float:
        """Return the fewest bytes that the stage with the largest load can have in any split, up to PRECISION."""
        low, high = 0.0, self.fixed[-1] + max(self.counts) * self.flying[-1]
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._filled(self.costs[-1], middle) else (middle, high)
        return high

    def fastest(self, share: float) -> Ranges | None:
        """Return the split whose longest stage takes the least time, up to PRECISION, among the splits in which no
        stage's load exceeds `share` bytes; None if there is none.
        """
        best = self._filled(self.costs[-1], share)
        low, high = 0.0, self.costs[-1]
        while best is not None and high - low > PRECISION * high:
            middle = (low + high) / 2
            split = self._filled(middle, share)
            best, low, high = (split, low, middle) if split else (best, middle, high)
        return best

    def _filled(self, seconds: float, share: float) -> Ranges | None:
        """Return a split with at most `seconds` and `share` bytes per stage, filled greedily; None if there is none."""
        layers, depth, bounds = len(self.costs) - 1, len(self.counts), [0]
        for stage, count in enumerate(self.counts):
            first, most = bounds[-1], layers - (depth - 1 - stage)
            until = self.costs[first] + seconds
            end = bisect_right(self.costs, until, first, most + 1) - 1
            held = self.fixed[first] + count * self.flying[first] + share
            end = (
                bisect_right(
                    range(layers + 1), held, first, end + 1, key=lambda at: self.fixed[at] + count * self.flying[at]
                )
                - 1
            )
            if end <= first:
                return None
            bounds.append(end)
        return tuple(pairwise(bounds)) if bounds[-1] == layers else None
