"""Decisions about one job's pods: pure functions from the wanted and the existing pods to actions.

The controller executes the actions of one decision before it makes the next decision, on a new view.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bamboo_core.coordinator.events import Emit, WorkerState
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.manifests.worker_pod import worker_number, worker_pool
from bamboo_operator.pods import starting
from bamboo_operator.pods.pools import fallback_pool, pool_to_probe, surplus_worker, worker_to_revert
from bamboo_operator.pods.view import PodsView
from bamboo_operator.signals.signals import is_deleted, worker_exit

LEAVE_SECONDS = 10.0  # after a worker was lost, refused or asked to leave, until its pod is deleted
KEPT_CRASHES = 10  # pods of failed workers that are kept, for their logs


@dataclass(frozen=True, slots=True)
class Withdraw:
    """An action: tell the coordinator that `count` of the workers that it requested will not be created."""

    count: int


@dataclass(frozen=True, slots=True)
class Create:
    """An action: create the next worker's pod.

    pool: None for any node. probe: the pod only tests whether that pool has nodes.
    """

    pool: NodePool | None
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """An action: delete a worker's pod. forced: the worker did not exit when asked to. event: emitted for the user."""

    worker: WorkerId
    forced: bool = False
    event: Emit | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """An action: ask the coordinator to let a worker go, after a planned takeover if the worker trains. message: the
    reason, for the user.
    """

    worker: WorkerId
    message: str


@dataclass(frozen=True, slots=True)
class Replace:
    """An action: release a worker whose pod is outdated, unless the API server finds the newest template invalid."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class KeepProbes:
    """An action: from now on count these workers, and no others, as probes of a pool."""

    workers: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class LetQuotaGo:
    """An action: if it is this job's turn, release the quota that is too small for the job to begin."""


Action = Withdraw | Create | Delete | Release | Replace | KeepProbes | LetQuotaGo
Decision = Callable[[PodsView], Iterator[Action]]


def withdraw(view: PodsView) -> Iterator[Action]:
    if count := min(view.adding, view.wanted.surplus):
        yield Withdraw(count)


def let_quota_go(view: PodsView) -> Iterator[Action]:
    if view.now >= view.quota.due:
        yield LetQuotaGo()


def yield_quota(view: PodsView) -> Iterator[Action]:
    """Delete the pods of a job that pauses after giving its quota back; release joined workers before their deletion.

    At other times delete waiting pods of the queue's growth priority class that the job needs in the first class.
    """
    request = view.queue_request
    going = tuple(view.staying) if view.now < view.quota.until else request.outranked if request else ()
    for name in going:
        if name in view.demand.joined:
            yield Release(name, f"{name} is given back: the job cannot begin with the quota that it holds")
        yield Delete(name)


def create(view: PodsView) -> Iterator[Action]:
    """Create one pod, or withdraw surplus requests. The controller decides again after each pod, because fewer may be
    wanted by then.
    """
    if view.adding and view.wanted.surplus:
        yield from withdraw(view)
    elif view.may_create and (view.next_pool or not view.spec.node_pools):
        yield Create(view.next_pool)


def delete_ended(view: PodsView) -> Iterator[Action]:
    """Delete the pods of ended workers, except the last KEPT_CRASHES failed ones. Also delete the pods of workers that
    have not ended LEAVE_SECONDS after they were lost, refused or asked to leave.
    """
    pods = view.pods
    ended = {name: found for name, pod in pods.items() if (found := worker_exit(pod)) is not None}
    failed = sorted((n for n, (code, _) in ended.items() if code != 0), key=lambda n: worker_number(pods[n]) or 0)
    kept = failed[-KEPT_CRASHES:]
    for worker in ended:
        if worker not in kept and not is_deleted(pods[worker]):
            yield Delete(worker)
    for worker, since in view.stopping.items():
        if view.now - since > LEAVE_SECONDS:
            yield Delete(worker, forced=True)


def replace_unjoined(view: PodsView) -> Iterator[Action]:
    """Delete the pods of workers that have run for REPLACE_SECONDS without connecting; the coordinator then requests
    others. A restarted coordinator first waits for its workers.
    """
    if view.wanted.recovering:
        return  # they train, and try to connect again
    for name, seconds in view.unjoined.items():
        if seconds > starting.REPLACE_SECONDS and name in view.pods and name not in view.deleted:
            message = f"{name} has run for {seconds:.0f} s and has not joined; it is replaced"
            yield Delete(name, event=Emit("WorkerSilent", message, True))


def move_to_fallback(view: PodsView) -> Iterator[Action]:
    """Delete one pod that has waited too long for a node, if a fallback pool may now be used. The coordinator then
    requests another worker, whose pod is created in that pool.
    """
    if view.waiting_since is None:
        return
    for name, pod in view.unscheduled.items():
        pool = worker_pool(pod)
        if pool is None or name in view.probes or name in view.deleted:
            continue
        since = max(view.waiting_since, view.released.get(name, 0.0))
        target = fallback_pool(view.spec.node_pools, pool, view.now, since, view.by_pool)
        if target is not None:
            message = f"{name} finds no node in pool {pool}; pool {target.name} is tried"
            yield Delete(name, event=Emit("FallbackPool", message, True))
            return


def roll(view: PodsView) -> Iterator[Action]:
    """Carry out the rollout's next step: delete an outdated pod that is not ready, or replace an outdated worker."""
    step = view.rollout
    if step.delete is not None and step.delete in view.pods:  # it may have been deleted in this very reconciliation
        yield Delete(step.delete)
    if step.release is not None and not view.backoff.holds(view.now):
        yield Replace(step.release)


def shrink(view: PodsView) -> Iterator[Action]:
    """Give back a surplus worker, or a fallback pool's worker once an earlier pool has nodes again.

    To test the earlier pool, create a probe: a pod for one worker more than wanted. Do nothing during a rollout.
    """
    if view.rolls:
        return
    pools, wanted, joined = view.spec.node_pools, view.wanted, dict(view.status.workers)
    placed = {name: worker_pool(pod) or "" for name, pod in view.living.items() if name not in wanted.gone}
    standby = [w for w, state in joined.items() if state is WorkerState.STANDBY]
    leaving = [w for w, state in joined.items() if state is WorkerState.LEAVING]
    counts, probes = Counter(placed.values()), view.probes
    if not any(pool.after_seconds and counts[pool.name] for pool in pools):
        probes = frozenset()
    elif view.status.phase == "Running":
        worker = worker_to_revert(pools, placed, standby, leaving, view.spec.standby.workers)
        if worker is not None:
            yield KeepProbes(probes - joined.keys())
            yield Release(worker, f"pool {placed[worker]} is no longer needed; {worker} is released")
            return
        waiting = Counter(worker_pool(pod) or "" for pod in view.without_node.values())
        target = pool_to_probe(pools, counts, waiting)
        # a leaving worker counts, too, so that there is one probe at a time
        if target is not None and not view.adding and len(placed) <= wanted.number:
            if view.may_ask_for_quota:
                yield Create(target, probe=True)
            return
    probes = (probes & placed.keys()) - joined.keys()  # a joined probe may have replaced another worker
    yield KeepProbes(probes)
    counted = {name: pool for name, pool in placed.items() if name not in probes}
    late = [name for name in view.without_node if name not in joined]
    idle = () if wanted.chosen else standby  # else the coordinator chooses which workers it gives back
    worker = surplus_worker(pools, counted, late, idle, leaving, wanted.number)
    if worker in late:
        yield Delete(worker)
    elif worker is not None:
        yield Release(worker, f"{worker} is released: {wanted.number} workers are wanted")


DECISIONS: tuple[Decision, ...] = (
    let_quota_go,
    yield_quota,
    create,
    delete_ended,
    replace_unjoined,
    move_to_fallback,
    roll,
    shrink,
)
