"""How much memory workers need, from sizes of layers; `bamboo validate --load` counts it from the task. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bamboo_core.job.spec import JobSpec, RedundancyMode, ReplicaPlacement, in_force
from bamboo_core.planning.gradient_groups import gradient_bytes, most_microbatches
from bamboo_core.planning.grid import Roles, layer_ranges, worker_roles
from bamboo_core.planning.profile import ModelFigures, ModelProfile
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.splits.devices import device_layers, device_roles
from bamboo_core.planning.splits.uneven_split import Ranges


def device_bytes(figures: ModelFigures, spec: JobSpec, *, taken_over: bool, split: Ranges | None = None) -> int:
    """The bytes of the device that needs most: in calm, or while its worker runs the stages of lost workers, too.

    split: the layers of each stage, if it is not by their costs. Raises ValueError if the layers cannot be split so.
    """
    spec, devices = in_force(spec), spec.worker.devices
    stages = split or layer_ranges(figures.costs, spec.topology, devices=devices)
    ranges = device_layers(spec, stages, figures.costs) or stages
    roles = worker_roles(spec, len(stages), taken_over=taken_over)
    return max(_of(figures, spec, ranges, device_roles(one, at, devices)) for one in roles for at in range(devices))


def spare_bytes(
    figures: ModelFigures, spec: JobSpec, stages: tuple[tuple[int, int], ...], kept: tuple[int, ...]
) -> int:
    """The bytes of the device that needs most of a worker that runs nothing and keeps replicas of these stages."""
    devices = spec.worker.devices
    ranges = device_layers(spec, stages, figures.costs) or stages
    roles = Roles(stage=None, owned=(), kept=kept)
    return max(_of(figures, spec, ranges, device_roles(roles, at, devices)) for at in range(devices))


def most_bytes(figures: ModelFigures, spec: JobSpec, split: Ranges | None = None) -> int:
    """The bytes of the device that needs most at any time: also while a worker runs a lost one's stage, if there are
    copies for that, or other pipelines' owners.
    """
    several = spec.redundancy.mode is not RedundancyMode.NONE or spec.topology.pipelines > 1
    protected = several and spec.topology.stages > 1
    return max(device_bytes(figures, spec, taken_over=over, split=split) for over in {False, protected})


def _of(figures: ModelFigures, spec: JobSpec, ranges: Sequence[tuple[int, int]], roles: Roles) -> int:
    depth, owned, kept = len(ranges), roles.owned, roles.kept
    microbatches = most_microbatches(spec.training, spec.topology.pipelines)
    on_host = spec.redundancy.placement is ReplicaPlacement.HOST

    def each(stages: Iterable[int], *names: str) -> int:
        parts = (figures.layers[slice(*ranges[s])] for s in stages)
        return sum(getattr(layer, name) for layers in parts for layer in layers for name in names)

    def in_flight(s: int) -> int:
        order = StageOrder.of(spec.topology)
        order = order.taken_over() if s in roles.taken_over else order
        inputs = figures.layers[ranges[s][0] - 1].boundary if s else 0
        return order.in_flight(s, depth, microbatches) * (inputs + each([s], "activations", "boundary"))

    replica = each(kept, "parameters") if on_host else each(kept, "parameters", "optimizer")
    gradients = gradient_bytes(spec, each(owned, "gradients"), each(kept, "gradients"))
    state = each(roles.states, "parameters", "optimizer") + replica
    return state + gradients + sum(map(in_flight, owned))


def memory_warning(profile: ModelProfile, spec: JobSpec) -> str:
    """A sentence if a worker may not have enough; "" if it has, as with every grid that the coordinator chooses."""
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
            there = f"{memory / 1e9:.1f} GB"
            return f"a {one} needs about {needed / 1e9:.1f} GB{when}, and a machine of the profile has {there}"
    return ""
