"""Conversion of changes of a job's pods and nodes into events for its coordinator. No I/O."""

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from bamboo_core import names
from bamboo_core.control.protocol import Hello
from bamboo_core.coordinator.events import Emit, Event, NoticeWithdrawn, PreemptionNotice, WorkerLost
from bamboo_core.kube.api import Object
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube.objects import JobIdentity, owner_uid, utc_now
from bamboo_operator.signals.node_marks import NodeMark
from bamboo_operator.signals.signals import (
    POD_DELETED,
    Signal,
    SignalKind,
    is_deleted,
    node_deleted_signal,
    pod_deleted_signal,
    worker_signal,
)


class WorkerWatch:
    """The state of one job's workers in the cluster.

    marks: the installation's own marks of nodes. signals: the number of losses and notices by source; this class counts
    only losses. lost: workers gone for good, whatever their pods show. joined: workers that have connected since this
    watch began.
    """

    def __init__(
        self, job: JobIdentity, cluster: ClusterIndices, marks: Sequence[NodeMark], signals: Counter[str]
    ) -> None:
        self._job, self._cluster, self._marks, self._signals = job, cluster, marks, signals
        self.lost: set[WorkerId] = set()
        self.joined: set[WorkerId] = set()
        self._forced: set[WorkerId] = set()  # workers that did not exit, so their pods were deleted

    def pods(self) -> dict[WorkerId, Object]:
        return self._cluster.pods(*self._job)

    def begin(self, known_lost: Collection[WorkerId], *, resumed: bool) -> None:
        """Set the workers that are lost at the start.

        known_lost, resumed: as in `TrainingRun`. Unless resumed, workers whose pods are being deleted are lost, too.
        """
        self.lost = {
            name for name, pod in self.pods().items() if name in known_lost or (not resumed and is_deleted(pod))
        }

    # changes

    def pod_changed(self, name: WorkerId) -> Event | None:
        """Return the event for a change of a worker's pod, or of that pod's node; None if the worker is lost or
        unknown.
        """
        pod = self.pods().get(name)
        if pod is None or name in self.lost:
            return None
        signal = worker_signal(pod, self._cluster.node_of(pod), utc_now(), self._marks)
        if signal is None:
            return NoticeWithdrawn(name)
        if signal.kind is SignalKind.NOTICE:
            cause = Emit(signal.source, f"{name}: {signal.message}", True)
            return PreemptionNotice(name, signal.seconds, cause=cause)
        return self._gone(name, signal)

    def pod_deleted(self, pod: Object) -> WorkerLost | None:
        name = pod["metadata"]["name"]
        return self._gone(name, pod_deleted_signal(name)) if owner_uid(pod) == self._job.uid else None

    def node_deleted(self, pod: WorkerId, node: str) -> WorkerLost | None:
        return self._gone(pod, node_deleted_signal(node)) if pod in self.pods() else None

    def _gone(self, worker: WorkerId, signal: Signal) -> WorkerLost | None:
        if worker in self.lost:
            return None
        self.lost.add(worker)
        self._signals[signal.source] += 1
        removed = worker in self._forced and signal.source == POD_DELETED
        return WorkerLost(worker, signal.message, signal.exit_code, removed)

    # queries

    def uid_of(self, worker: WorkerId) -> str | None:
        """Return the uid of a worker's pod; "" if the worker is lost, None if its pod was not seen yet."""
        if worker in self.lost:
            return ""
        pod = self.pods().get(worker)
        return str(pod["metadata"].get("uid")) if pod else None

    def located(self, hello: Hello) -> Hello:
        """Return a worker's Hello with its node and zone, as far as the cluster shows them."""
        pod = self.pods().get(hello.worker)
        node = self._cluster.node_of(pod) if pod else None
        zone = (node["metadata"].get("labels") or {}).get(names.LABEL_ZONE) if node else None
        name = str(pod["spec"].get("nodeName") or "") if pod else ""
        return msgspec.structs.replace(hello, zone=str(zone or hello.zone), node=name)

    def removal_forced(self, worker: WorkerId) -> None:
        """Note that a pod is about to be deleted, because its worker did not exit."""
        self._forced.add(worker)
