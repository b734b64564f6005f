"""What happens to a job's pods and to their nodes, as events of its coordinator. No I/O.

`now` is time.monotonic(). An Emit among the events is for the user.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import msgspec

from bamboo_core import names
from bamboo_core.control.protocol import Hello
from bamboo_core.coordinator.events import Emit, Event, NoticeWithdrawn, PreemptionNotice, WorkerLost
from bamboo_core.kube.api import Object
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.objects import JobIdentity, owner_uid, utc_now
from bamboo_operator.signals.cloud_marks import DISRUPTIONS
from bamboo_operator.signals.node_marks import NodeMark
from bamboo_operator.signals.signals import (
    LEAST_SECONDS,
    POD_DELETED,
    Signal,
    SignalKind,
    is_deleted,
    node_deleted_signal,
    notice_ended_signal,
    pod_deleted_signal,
    worker_signal,
)

NOTICE_EXPIRY_SECONDS = 10.0  # after the end of its notice a worker that has not joined counts as lost


class WorkerWatch:
    """What the cluster says of one job's workers. marks: of nodes that go, which this installation has itself. signals:
    counts what is heard, by its source.

    lost: workers that are gone for good, whatever is still said of their pods. joined: those that have ever connected.
    """

    def __init__(
        self, job: JobIdentity, cluster: ClusterCache, marks: Sequence[NodeMark], signals: Counter[str]
    ) -> None:
        self._job, self._cluster, self._marks, self._signals = job, cluster, marks, signals
        self.lost: set[WorkerId] = set()
        self.joined: set[WorkerId] = set()
        self._notices: dict[WorkerId, float] = {}  # when these workers will be gone
        self._failed_starts: list[tuple[WorkerId, str]] = []  # ended before they joined, and how
        self._forced: set[WorkerId] = set()  # those that did not exit, so that their pods were deleted

    def pods(self) -> dict[WorkerId, Object]:
        return self._cluster.pods(*self._job)

    def begin(self, known_lost: Collection[WorkerId], *, resumed: bool) -> None:
        """Begins to watch. known_lost: their loss was handled before. resumed: those that are being deleted may still
        be of use.
        """
        self.lost = {
            name for name, pod in self.pods().items() if name in known_lost or (not resumed and is_deleted(pod))
        }

    # what happens

    def pod_changed(self, name: WorkerId, now: float) -> list[Event | Emit]:
        """The events of a change of a worker's pod, or of that pod's node."""
        pod = self.pods().get(name)
        if pod is None or name in self.lost:
            return []
        signal = worker_signal(pod, self._cluster.node_of(pod), utc_now(), self._marks)
        if signal is None:
            return [NoticeWithdrawn(name)] if self._notices.pop(name, None) is not None else []
        if signal.kind is SignalKind.NOTICE:
            return self._notice(name, signal, now)
        if name not in self.joined and _failed(pod):
            self.start_failed(name, signal.message)
        return self._gone(name, signal)

    def pod_deleted(self, pod: Object) -> list[Event | Emit]:
        name = pod["metadata"]["name"]
        return self._gone(name, pod_deleted_signal(name)) if owner_uid(pod) == self._job.uid else []

    def node_deleted(self, pod: WorkerId, node: str) -> list[Event | Emit]:
        return self._gone(pod, node_deleted_signal(node)) if pod in self.pods() else []

    def _notice(self, name: WorkerId, signal: Signal, now: float) -> list[Event | Emit]:
        """Passed on if it is new, or ends earlier than the one before."""
        deadline, before = now + signal.seconds, self._notices.get(name)
        if before is not None and deadline > before - 1:
            return []
        self._notices[name] = deadline
        told: list[Event | Emit] = []
        if before is None:
            self._signals[signal.source] += 1
            told.append(Emit(signal.source, f"{name}: {signal.message}", True))
        return [*told, PreemptionNotice(name, signal.seconds)]

    def _gone(self, worker: WorkerId, signal: Signal) -> list[Event | Emit]:
        if worker in self.lost:
            return []
        self.lost.add(worker)
        self._notices.pop(worker, None)
        self._signals[signal.source] += 1
        removed = worker in self._forced and signal.source == POD_DELETED
        return [WorkerLost(worker, signal.message, signal.exit_code, removed)]

    # notices that the coordinator has to hear again, or whose time is over

    def open_notices(self, now: float) -> list[Event | Emit]:
        """The open notices of all workers, with the time that is left."""
        return [_left(worker, until - now) for worker, until in self._notices.items()]

    def open_notice(self, worker: WorkerId, now: float) -> list[Event | Emit]:
        """The notice of a worker as an event, if it has one."""
        return [_left(worker, self._notices[worker] - now)] if worker in self._notices else []

    def expired_notices(self, is_known: Callable[[WorkerId], bool], now: float) -> list[Event | Emit]:
        """The losses of workers whose notice is over and that the coordinator does not know, for it does not keep their
        notices.
        """
        over = [worker for worker, until in self._notices.items() if now > until + NOTICE_EXPIRY_SECONDS]
        unknown = [worker for worker in over if not is_known(worker)]
        return [event for worker in unknown for event in self._gone(worker, notice_ended_signal(worker))]

    # what others ask or say

    def uid_of(self, worker: WorkerId) -> str | None:
        """The uid of a worker's pod; empty if the worker is lost, None if its pod is not known (yet)."""
        if worker in self.lost:
            return ""
        pod = self.pods().get(worker)
        return str(pod["metadata"].get("uid")) if pod else None

    def located(self, hello: Hello) -> Hello:
        """The hello with the worker's node and zone, which the worker itself does not know."""
        pod = self.pods().get(hello.worker)
        node = self._cluster.node_of(pod) if pod else None
        zone = (node["metadata"].get("labels") or {}).get(names.LABEL_ZONE) if node else None
        name = str(pod["spec"].get("nodeName") or "") if pod else ""
        return msgspec.structs.replace(hello, zone=str(zone or hello.zone), node=name)

    def removal_forced(self, worker: WorkerId) -> None:
        """Notes that a pod is about to be deleted, because its worker did not exit."""
        self._forced.add(worker)

    def start_failed(self, worker: WorkerId, how: str) -> None:
        """Notes that a worker has ended before it joined, or will."""
        self._failed_starts.append((worker, how))

    def take_failed_starts(self) -> list[tuple[WorkerId, str]]:
        """The workers that failed to start since this was asked last, and how they ended."""
        taken, self._failed_starts = self._failed_starts, []
        return taken


def _left(worker: WorkerId, seconds: float) -> PreemptionNotice:
    return PreemptionNotice(worker, max(LEAST_SECONDS, seconds))


def _failed(pod: Object) -> bool:
    """Has it ended by itself, or was it refused by its node, and not taken away?"""
    status = pod.get("status") or {}
    taken = bool(pod["metadata"].get("deletionTimestamp")) or status.get("reason") in DISRUPTIONS
    return status.get("phase") in ("Failed", "Succeeded") and not taken
