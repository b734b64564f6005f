"""What follows from the facts about a namespace and a job: room in its quotas, its storage, its prices. Pure."""

from collections.abc import Iterator, Sequence

from bamboo.remote.diagnosis.facts import ClusterFacts, Object, Unreadable
from bamboo.remote.diagnosis.findings import Finding, ok, problem, unknown, warning
from bamboo.remote.diagnosis.quantities import quantity
from bamboo_core.job.spec import JobSpec, storage_place, whole_workers

SHARED = {"ReadWriteMany", "ReadOnlyMany"}


def namespace(facts: ClusterFacts) -> Iterator[Finding]:
    subject = f"namespace {facts.namespace}"
    if facts.namespace_object is None:
        yield problem(subject, "it does not exist", f"kubectl create namespace {facts.namespace}")
        return
    if isinstance(facts.namespace_object, Unreadable):
        yield unknown(subject, facts.namespace_object.why)
    if isinstance(facts.quotas, Unreadable):
        yield unknown("quotas", facts.quotas.why)
        return
    yield from _quotas(facts.quotas)


def _quotas(quotas: Sequence[Object]) -> Iterator[Finding]:
    for one in quotas:
        status = one.get("status") or {}
        used = status.get("used") or {}
        full = [
            name
            for name, most in sorted((status.get("hard") or {}).items())
            if quantity(used.get(name, "0")) >= quantity(most)
        ]
        name = f"quota {one['metadata']['name']}"
        if full:
            yield problem(name, f"it is used up: {', '.join(full)}", "raise it, or end other pods of the namespace")
        else:
            yield ok(name, "it has room")


def job(facts: ClusterFacts) -> Iterator[Finding]:
    """Nothing if no job was named."""
    if facts.spec is None:
        return
    yield from _storage(facts.spec, facts.claim)
    yield from _prices(facts.spec, facts)
    yield from _queue(facts.spec, facts)


def _storage(spec: JobSpec, claim: Object | Unreadable | None) -> Iterator[Finding]:
    storage = spec.checkpoint.storage if spec.checkpoint else None
    if storage is None:
        yield warning(
            "checkpoints",
            "the job keeps none: if a stage's last copy is lost it begins again at step 0",
            "set spec.checkpoint.storage (docs/checkpoints.md)",
        )
        return
    if storage.claim_name is None:
        where = storage_place(storage.uri, None)
        yield unknown("checkpoints", f"{where} is tried by the workers when the job starts, and not from here")
        return
    subject = f"claim {storage.claim_name}"
    if isinstance(claim, Unreadable):
        yield unknown(subject, claim.why)
    elif claim is None:
        yield problem(subject, "there is none, so workers wait for it", "create the PersistentVolumeClaim")
    else:
        yield from _claim(subject, claim, whole_workers(spec))


def _claim(subject: str, claim: Object, workers: int) -> Iterator[Finding]:
    phase = (claim.get("status") or {}).get("phase")
    modes = set((claim.get("spec") or {}).get("accessModes") or ())
    if phase == "Lost":
        yield problem(subject, "its volume is lost", "create another claim, and restore its files")
    elif workers > 1 and not modes & SHARED:
        yield problem(
            subject,
            f"only one node can mount it ({', '.join(sorted(modes)) or 'no access mode'}), for {workers} workers",
            "use a claim with ReadWriteMany, or checkpoint.storage.uri",
        )
    elif phase != "Bound":
        yield warning(
            subject,
            f"it is {phase}",
            "right if its storage class waits for the first pod; else look at: kubectl describe pvc",
        )
    else:
        yield ok(subject, "it is bound, and every worker can mount it")


def _prices(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    unpriced = [pool.name for pool in spec.node_pools if pool.price_per_hour is None]
    if unpriced or not spec.node_pools:
        which = f"node pools {', '.join(unpriced)}" if unpriced else "the job's nodes"
        yield warning(
            "prices",
            f"none is known for {which}, so status, budget and objective Value cannot count money",
            "set nodePools[].pricePerHour (docs/operating.md#costs)",
        )
    else:
        yield ok("prices", "every node pool has one")


def _queue(spec: JobSpec, facts: ClusterFacts) -> Iterator[Finding]:
    if spec.queue is None:
        return
    subject, queue = f"queue {spec.queue.name}", facts.queue
    if isinstance(queue, Unreadable):
        yield unknown(subject, queue.why)
    elif queue is None:
        yield problem(
            subject,
            f"{facts.namespace} has no such LocalQueue of kueue.x-k8s.io/v1beta2",
            "create it, or install Kueue 0.18 or newer (docs/install.md)",
        )
    else:
        active = [one for one in (queue.get("status") or {}).get("conditions") or () if one.get("type") == "Active"]
        stopped = [one.get("message", "") for one in active if one.get("status") != "True"]
        if stopped:
            yield problem(subject, f"it is not active: {stopped[0]}", "look at its ClusterQueue")
        else:
            yield ok(subject, "the job's workers wait there for quota")
