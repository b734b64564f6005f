"""Scale-down: the worker that a job gives back, from a fallback pool once an earlier pool has nodes again, or beyond
the wanted number.

Pure. Only the request for one more worker there, a probe, shows whether an earlier pool has nodes again.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.pods.pools import Pools, pool_to_probe, worker_to_revert


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersByPool:
    """A job's living workers."""

    pools: Pools
    placed: Mapping[WorkerId, str]  # the pool of each worker that is not lost
    without_node: Mapping[WorkerId, str]  # the pool of each worker that has no node
    # joined, standby, leaving: as the coordinator reports them
    joined: Collection[WorkerId] = ()
    standby: Collection[WorkerId] = ()
    leaving: Collection[WorkerId] = ()
    wanted: int  # how many workers the job asks for
    keep_standby: int = 0  # how many of them stay on standby
    training: bool = True  # whether a plan runs and, after a restart, all its workers are back
    adding: int = 0  # how many pods are requested and not created yet
    probes: frozenset[WorkerId] = frozenset()  # workers that were requested only to try a pool
    chosen: bool = False  # whether the coordinator chooses which workers are given back


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """One step of scaling down; at most one field is set, apart from the probes."""

    release: WorkerId | None = None  # the worker that leaves; `reason`: why, a sentence
    reason: str = ""
    delete: WorkerId | None = None  # the worker whose pod has no node and is deleted
    probe: NodePool | None = None  # the pool in which one more worker is requested
    probes: frozenset[WorkerId] = frozenset()  # the probes that remain


def scale_down(workers: WorkersByPool) -> ScaleDown:
    """Decide the next step of scaling down: at most one worker at a time."""
    pools, placed, probes = workers.pools, workers.placed, workers.probes
    counts = Counter(placed.values())
    if not any(pool.after_seconds and counts[pool.name] for pool in pools):
        probes = frozenset()
    elif workers.training:
        worker = worker_to_revert(pools, placed, workers.standby, workers.leaving, workers.keep_standby)
        if worker is not None:
            reason = f"pool {placed[worker]} is no longer needed; {worker} is released"
            return ScaleDown(release=worker, reason=reason, probes=probes - set(workers.joined))
        target = pool_to_probe(pools, counts, Counter(workers.without_node.values()))
        # a leaving worker counts, too, so that there is one probe at a time
        if target is not None and not workers.adding and len(placed) <= workers.wanted:
            return ScaleDown(probe=target, probes=probes)
    probes = (probes & placed.keys()) - set(workers.joined)  # a joined probe may have replaced another worker
    counted = {name: pool for name, pool in placed.items() if name not in probes}
    late = [name for name in workers.without_node if name not in workers.joined]
    standby = () if workers.chosen else workers.standby
    worker = surplus_worker(pools, counted, late, standby, workers.leaving, workers.wanted)
    if worker is None or worker in late:
        return ScaleDown(delete=worker, probes=probes)
    return ScaleDown(release=worker, reason=f"{worker} is released: {workers.wanted} workers are wanted", probes=probes)


def surplus_worker(
    pools: Pools,
    placed: Mapping[WorkerId, str],
    waiting: Collection[WorkerId],
    standby: Collection[WorkerId],
    leaving: Collection[WorkerId],
    wanted: int,
) -> WorkerId | None:
    """Return the worker to give back because there are more than wanted, as after an edit to fewer pipelines.

    One at a time: None while any worker is leaving, and while no worker is idle. placed: the pool of each existing or
    requested worker; waiting: the workers without a node, which go first; standby: the workers that hold no stage. Of
    several, the worker in the last pool goes.
    """
    if leaving or len(placed) <= wanted:
        return None
    order = {pool.name: index for index, pool in enumerate(pools)}
    idle = [w for w in waiting if w in placed] or [w for w in standby if w in placed]
    return max(idle, key=lambda w: (order.get(placed[w], -1), len(w), w), default=None)
