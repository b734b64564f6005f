"""The facts of a diagnosis, read from a cluster at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bamboo.remote.operator_pods import running_operator
from bamboo_core.job.spec import JobSpec

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A fact that could not be read. why: a sentence, such as that permission is denied."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The facts of a cluster; None: the object does not exist.

    namespace: of the jobs. operators: pods of all operators that were found. lease: of the namespace's operator, None
    if it uses none. rights: whether the caller has each verb on jobs that submitting needs. spec: of the job; None
    without one. queue: the job's LocalQueue.
    """

    namespace: str
    crd: Object | Unreadable | None
    operators: Sequence[Object] | Unreadable
    lease: Object | Unreadable | None
    rights: Mapping[str, bool] | Unreadable
    quotas: Sequence[Object] | Unreadable
    nodes: Sequence[Object] | Unreadable
    spec: JobSpec | None = None
    queue: Object | Unreadable | None = None

    @property
    def operator_pod(self) -> Object | None:
        """Return the running pod of the namespace's operator; None if there is none, or none is known."""
        return None if isinstance(self.operators, Unreadable) else running_operator(self.operators, self.namespace)
