"""Scheduling gates of a pod's template or of Kueue, which hold a pod back: it does not look for a node yet."""

from collections.abc import Mapping
from typing import Any

from bamboo_core.job.spec import JobSpec
from bamboo_core.names import QUEUE_GATE
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.manifests.template import read_templates

Json = Mapping[str, Any]


def gates_of(pod: Json) -> tuple[str, ...]:
    """Return the names of the gates that hold the pod back; none if the scheduler may place it."""
    return tuple(str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ())


def waits_for_quota(pod: Json) -> bool:
    """Return whether Kueue holds the pod back until there is quota for it."""
    return QUEUE_GATE in gates_of(pod)


class GateReleases:
    """The times at which the gates of pods without a node went away.

    A pod does not show whether it ever had gates. If a pod may have had some, and has none when it is first seen, as
    after a restart of the operator, it counts as released then.
    """

    def __init__(self, job: JobSpec) -> None:
        readings = (one for pool in (None, *job.node_pools) for one in read_templates(job, pool))
        of_template = any(one.template["spec"].get("schedulingGates") for one in readings)
        self._expected = of_template or job.queue is not None
        self._seen, self._held, self._at = set[WorkerId](), set[WorkerId](), dict[WorkerId, float]()

    def observe(self, waiting: Mapping[WorkerId, Json], now: float) -> None:
        """Note which gates have gone away. waiting: the pods that have no node, held back or not."""
        held = {name for name, pod in waiting.items() if gates_of(pod)}
        new = waiting.keys() - self._seen
        released = (self._held | (new if self._expected else set())) - held
        at = self._at | dict.fromkeys(released, now)
        self._at = {name: at[name] for name in at.keys() & waiting.keys()}
        self._seen, self._held = set(waiting), held

    def at(self, worker: WorkerId) -> float | None:
        """Return when the worker's gates went away; None if it was never held back."""
        return self._at.get(worker)
