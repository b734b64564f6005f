"""Which worker a job gives back: a fallback pool's once an earlier pool delivers again, or one more than is wanted.

Pure. Whether an earlier pool has nodes again is only known by requesting one more worker there, a probe.
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
    placed: Mapping[WorkerId, str]  # the pool of each one that is not lost
    without_node: Mapping[WorkerId, str]  # of those that have no node
    # joined, standby, leaving: as the coordinator has them
    joined: Collection[WorkerId] = ()
    standby: Collection[WorkerId] = ()
    leaving: Collection[WorkerId] = ()
    wanted: int  # how many workers the job asks for
    keep_standby: int = 0  # how many of them on standby
    training: bool = True  # does a plan run, and are no workers missing from it after a restart?
    adding: int = 0  # how many pods are requested and not created yet
    probes: frozenset[WorkerId] = frozenset()  # workers that were requested only to try a pool
    chosen: bool = False  # does the coordinator choose who of those that are there is given back?


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """A step of going down, at most one of these."""

    release: WorkerId | None = None  # the worker that is to leave, and why, a sentence
    reason: str = ""
    delete: WorkerId | None = None  # one whose pod has no node and is deleted
    probe: NodePool | None = None  # the pool in which one more worker is requested
    probes: frozenset[WorkerId] = frozenset()  # those that remain


def scale_down(workers: WorkersByPool) -> ScaleDown:
    """What to do now; one worker at a time."""
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
        # a worker that leaves is counted, too, so that there is one probe at a time
        if target is not None and not workers.adding and len(placed) <= workers.wanted:
            return ScaleDown(probe=target, probes=probes)
    probes = (probes & placed.keys()) - set(workers.joined)  # who has come may have taken another's place
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
    """The worker that is given back because there are more than wanted, as after an edit to fewer pipelines.

    One at a time: None while any worker is leaving, and while nobody is idle. placed: the pool of each worker that is
    there or requested; waiting: those of them without a node, which go first; standby: those that hold no stage. Of the
    others the one in the last pool goes.
    """
    if leaving or len(placed) <= wanted:
        return None
    order = {pool.name: index for index, pool in enumerate(pools)}
    idle = [w for w in waiting if w in placed] or [w for w in standby if w in placed]
    return max(idle, key=lambda w: (order.get(placed[w], -1), len(w), w), default=None)
