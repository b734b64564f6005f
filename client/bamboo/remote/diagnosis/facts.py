"""What a diagnosis knows of a cluster, as it was read at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bamboo.remote.operator_pods import running_operator
from bamboo_core.job.spec import JobSpec

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of what could not be read. why: a sentence, such as that permission is denied."""

    why: str


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on a kind of objects. group: of the API, "" for the core. resource: with its subresource, such as
    pods/log. namespaced: it is needed in the jobs' namespace, and not in the whole cluster.
    """

    verb: str
    group: str
    resource: str
    namespaced: bool = True

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """namespace: where jobs are, or are to be. minor: the 36 of Kubernetes 1.36. operators: the pods of all operators
    that could be found. lease: that of the namespace's operator, None if it uses none. slices: the EndpointSlices that
    name its pod. person, operator: whether each right is there. spec: the job's, None if none was named. Of objects
    None: there is none.
    """

    namespace: str
    minor: int | Unreadable
    namespace_object: Object | Unreadable | None
    crd: Object | Unreadable | None
    operators: Sequence[Object] | Unreadable
    lease: Object | Unreadable | None
    slices: Sequence[Object] | Unreadable
    person: Mapping[Right, bool] | Unreadable
    operator: Mapping[Right, bool] | Unreadable
    quotas: Sequence[Object] | Unreadable
    nodes: Sequence[Object] | Unreadable
    spec: JobSpec | None = None
    claim: Object | Unreadable | None = None
    queue: Object | Unreadable | None = None  # the LocalQueue that the job names

    @property
    def operator_pod(self) -> Object | None:
        """The running pod of the namespace's operator; None if there is none, or none is known."""
        return None if isinstance(self.operators, Unreadable) else running_operator(self.operators, self.namespace)
