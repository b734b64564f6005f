"""Warnings about valid manifests, one sentence each. Pure."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from bamboo_core.job.placement_spec import GPU_SUFFIX, MOST_DEVICES, SpreadPolicy
from bamboo_core.job.pod_templates import asks_for_gpus, templates_of, worker_resources
from bamboo_core.job.spec import MOST_REPLICAS, JobSpec, RedundancyMode, most_pipelines, pod_spread, wanted_workers
from bamboo_core.names import TRAINER_CONTAINER
from bamboo_core.text import count

NUMBERS = ("one", "two", "three", "four")  # of workers that hold a stage, by the number of its replicas


def warnings(spec: JobSpec) -> tuple[str, ...]:
    """Return all warnings about a spec; each names one or more fields."""
    of_protection = (_one_pipeline(spec), _replicas(spec))
    found = (
        *of_protection,
        _loggers(spec),
        _one_zone(spec),
        _nodes(spec),
        _devices(spec),
        _devices_of_pools(spec),
        _budget(spec),
        *_first_pool(spec),
        *_containers(spec),
    )
    return tuple(filter(None, found))


def _first_pool(spec: JobSpec) -> Iterator[str]:
    """Warn about `afterSeconds` in the first pool, which has no earlier pool to wait for."""
    for first in spec.node_pools[:1]:
        if first.after_seconds:
            yield f"node pool {first.name}: afterSeconds has no effect in the first pool; it belongs to a later one"


def _containers(spec: JobSpec) -> Iterator[str]:
    """Warn about containers whose name looks like a misspelt `trainer`: they run beside the worker's container."""
    for path, template in templates_of(spec):
        inside = template.get("spec")
        containers = inside.get("containers") if isinstance(inside, Mapping) else None
        for index, container in enumerate(containers if isinstance(containers, list) else ()):
            name = container.get("name") if isinstance(container, Mapping) else None
            alike = isinstance(name, str) and get_close_matches(name.lower(), [TRAINER_CONTAINER], cutoff=0.8)
            if alike and name != TRAINER_CONTAINER:
                beside = f"a container of its own beside the worker's, which is called {TRAINER_CONTAINER}"
                yield f"{path}.spec.containers[{index}].name {name}: {beside}"


def _one_zone(spec: JobSpec) -> str:
    """Warn about ZonePerPipeline with one pipeline, and SingleZone without checkpoints: one zone has all workers."""
    policy = pod_spread(spec)
    if policy is SpreadPolicy.ZONE_PER_PIPELINE and most_pipelines(spec) == 1:
        return "spec.spread.policy ZonePerPipeline with one pipeline: the whole job is in one zone, as with SingleZone"
    if policy is SpreadPolicy.SINGLE_ZONE and spec.checkpoint is None:
        return "spec.spread.policy SingleZone without spec.checkpoint: the job ends if all nodes of its zone are lost"
    return ""


def _budget(spec: JobSpec) -> str:
    """Warn if a job without checkpoints may run out of money, and then lose its progress."""
    if spec.budget is None or spec.budget.money is None or spec.checkpoint is not None:
        return ""
    return "spec.budget.money without spec.checkpoint: what is trained is lost when the money is spent before the end"


def _nodes(spec: JobSpec) -> str:
    """Warn if the loss of one node takes all workers, or neighbours in a pipeline; not if redundancy is off."""
    room, workers = spec.spread.workers_per_node, wanted_workers(spec)
    nodes = spec.spread.nodes(workers)
    if room == 1 or workers == 1 or spec.redundancy.mode is RedundancyMode.NONE:
        return ""
    if nodes == 1:
        ends = "the job goes back to its newest checkpoint" if spec.checkpoint else "the job ends"
        return f"spec.spread.workersPerNode {room}: all {workers} workers are on one node, with whose loss {ends}"
    stages, pipelines = spec.topology.stages, spec.topology.pipelines
    if spec.redundancy.on(pipelines).kept and stages > 1 and room > pipelines * (stages // 2):
        neighbours = f"a node with {room} workers has neighbours in a pipeline of {count(stages, 'stage')}"
        return f"spec.spread.workersPerNode {room}: {neighbours}, whose stages one worker repeats if they are lost"
    return ""


def _devices(spec: JobSpec) -> str:
    """Warn about idle GPUs, and about workers with several devices that request no GPUs."""
    devices, gpus = spec.worker.devices, spec.worker.resources.gpus
    without = [pool for pool in spec.node_pools or (None,) if not asks_for_gpus(spec, pool)]
    if devices > 1 and without:
        asks = "spec.worker.resources asks" if without[0] is None else f"node pool {without[0].name} asks"
        none = f"{asks} for no GPUs, such as nvidia.com/gpu"
        return f"spec.worker.devices {devices}: {none}; on a cluster a worker without GPUs fails"
    if idle := next((number for number in gpus if number not in ("0", "1") and devices == 1), ""):
        allowed = idle.isdigit() and int(idle) <= MOST_DEVICES
        better = f"spec.worker.devices {idle} uses all" if allowed else "more workers with one GPU each would use all"
        return f"spec.worker.resources: a worker uses one of its {idle} GPUs; {better}"
    return ""


def _devices_of_pools(spec: JobSpec) -> str:
    """Warn about a pool's template that requests too few GPUs, or GPUs that stay idle."""
    devices = spec.worker.devices
    for pool in spec.node_pools:
        asked = {str(n) for name, n in worker_resources(spec, pool).items() if name.endswith(GPU_SUFFIX)}
        if pool.template and (other := asked - {"0", str(devices)}):
            return (
                f"node pool {pool.name}: its template asks for {min(other)} GPUs, and spec.worker.devices is {devices}"
            )
    return ""


def _loggers(spec: JobSpec) -> str:
    """Warn about loggers without a checkpoint store, which would hold the history that loggers receive."""
    if spec.training.loggers and spec.checkpoint is None:
        return "spec.training.loggers are given nothing without spec.checkpoint, but by bamboo run --output"
    return ""


def _replicas(spec: JobSpec) -> str:
    """Warn about replicas that have no effect, or are more than the workers can hold."""
    asked, others = spec.redundancy.replicas, wanted_workers(spec) - 1
    if asked > 1 and spec.redundancy.mode is RedundancyMode.NONE:
        return f"spec.redundancy.replicas {asked} has no effect with spec.redundancy.mode None"
    if asked > max(1, others):
        return f"spec.redundancy.replicas {asked}: a worker has only {count(others, 'other')} to hold its stage's state"
    return ""


def _one_pipeline(spec: JobSpec) -> str:
    """Warn about losses that a single pipeline does not survive; with several, each stage survives in the others."""
    topology = spec.topology
    if topology.pipelines > 1:
        return ""
    ends = "the job goes back to its newest checkpoint" if spec.checkpoint else "the job ends"
    if spec.elastic and wanted_workers(spec) > 1:
        alone = f"spec.redundancy.mode None: {ends} if any worker vanishes while there is one pipeline"
        two = "; with spec.topology.pipelines: 2 there are always two" if topology.chooses_stages else ""
        return f"{alone}{two}" if spec.redundancy.mode is RedundancyMode.NONE else ""
    remedy = "with spec.topology.pipelines: 2 the other pipeline still has what they hold"
    if spec.redundancy.mode is RedundancyMode.NONE:
        return f"one pipeline and spec.redundancy.mode None: {ends} if any worker vanishes; {remedy}"
    replicas, others = spec.redundancy.replicas, wanted_workers(spec) - 1
    if topology.stages == 1 and not others:
        keeps = "with spec.standby.workers: 1 a second worker holds its state"
        return f"one worker and no other copy of its state: {ends} if it vanishes; {keeps}"
    if topology.stages == 1:
        return f"one pipeline of one stage: {ends} if its worker vanishes before a standby is filled; {remedy}"
    holders = NUMBERS[min(replicas, others)]
    if replicas < min(others, MOST_REPLICAS):
        remedy += f", and with spec.redundancy.replicas: {replicas + 1} another worker"
    return f"one pipeline: {ends} if {holders} neighbouring workers vanish at the same time; {remedy}"
