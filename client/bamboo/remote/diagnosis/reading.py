"""Reading the facts of a diagnosis from a cluster. A fact without permission becomes Unreadable."""

from collections.abc import Awaitable
from typing import Final, TypeVar

from bamboo.remote.diagnosis.facts import ClusterFacts, Object, Unreadable
from bamboo.remote.operator_pods import arguments, operator_pods, running_operator
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, RemoteError
from bamboo_core.names import GROUP, KUEUE, PLURAL

T = TypeVar("T")
CRD: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"
SUBMITTING: Final = ("get", "create", "patch")  # verbs on jobs


async def read_facts(
    api: KubeApi, namespace: str, operator_namespace: str | None = None, spec: JobSpec | None = None
) -> ClusterFacts:
    """Read the facts. Raises ClusterUnreachable if nothing can be read, ApiError if the credentials are rejected."""
    operators = await _read(operator_pods(api, operator_namespace))
    pod = None if isinstance(operators, Unreadable) else running_operator(operators, namespace)
    return ClusterFacts(
        namespace=namespace,
        crd=await _read(api.find(CRD)),
        operators=operators,
        lease=await _lease(api, pod),
        rights=await _read(_rights(api, namespace)),
        quotas=await _read(api.listed(f"/api/v1/namespaces/{namespace}/resourcequotas")),
        nodes=await _read(api.listed("/api/v1/nodes")),
        spec=spec,
        queue=await _queue(api, namespace, spec),
    )


async def _read(asked: Awaitable[T]) -> T | Unreadable:
    try:
        return await asked
    except ClusterUnreachable:
        raise
    except RemoteError as error:
        if isinstance(error, ApiError) and error.status == 401:
            raise
        return Unreadable(str(error))


async def _lease(api: KubeApi, pod: Object | None) -> Object | Unreadable | None:
    """Return the operator's Lease; None if its arguments name none."""
    names = arguments(pod, "--lease") if pod is not None else set()
    if not names:
        return None
    namespace, _, name = min(names).partition("/")
    return await _read(api.read_lease(namespace, name))


async def _rights(api: KubeApi, namespace: str) -> dict[str, bool]:
    """Return whether the caller has each verb that submitting needs."""
    job = {"group": GROUP, "resource": PLURAL, "namespace": namespace}
    return {verb: await api.may({"verb": verb, **job}) for verb in SUBMITTING}


async def _queue(api: KubeApi, namespace: str, spec: JobSpec | None) -> Object | Unreadable | None:
    """Return the job's LocalQueue of Kueue."""
    if spec is None or spec.queue is None:
        return None
    return await _read(api.find(f"/apis/{KUEUE}/v1beta2/namespaces/{namespace}/localqueues/{spec.queue.name}"))
