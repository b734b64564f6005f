"""Reads from a cluster what a diagnosis is made of. What may not be looked at becomes Unreadable, and ends nothing."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

from bamboo.remote.diagnosis.facts import ClusterFacts, Object, Right, Unreadable
from bamboo.remote.diagnosis.rights import OPERATOR, PERSON
from bamboo.remote.operator_pods import arguments, operator_pods, running_operator
from bamboo_core.job.spec import JobSpec
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, RemoteError
from bamboo_core.names import GROUP, KUEUE, PLURAL

T = TypeVar("T")
REVIEWS = "/apis/authorization.k8s.io/v1"
CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"


async def read_facts(
    api: KubeApi, namespace: str, operator_namespace: str | None = None, spec: JobSpec | None = None
) -> ClusterFacts:
    """Raises ClusterUnreachable if nothing can be read, ApiError if the credentials are not accepted."""
    minor = await _read(api.minor_version())  # first: whoever cannot be reached is asked once
    operators = await _read(operator_pods(api, operator_namespace))
    pod = None if isinstance(operators, Unreadable) else running_operator(operators, namespace)
    claim_name = spec.checkpoint.storage.claim_name if spec is not None and spec.checkpoint is not None else None
    of_namespace = f"/api/v1/namespaces/{namespace}"
    return ClusterFacts(
        namespace=namespace,
        minor=minor,
        namespace_object=await _read(_there(api, of_namespace)),
        crd=await _read(_there(api, CRD)),
        operators=operators,
        lease=await _lease(api, pod),
        slices=await _slices(api, pod),
        person=await _read(_own_rights(api, namespace)),
        operator=await _operator_rights(api, pod, namespace),
        quotas=await _read(api.listed(f"{of_namespace}/resourcequotas")),
        nodes=await _read(api.listed("/api/v1/nodes")),
        spec=spec,
        claim=await _claim(api, of_namespace, claim_name),
        queue=await _queue(api, namespace, spec.queue.name if spec is not None and spec.queue is not None else None),
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


async def _there(api: KubeApi, path: str) -> Object | None:
    try:
        return await api.call("GET", path)
    except ApiError as error:
        if error.status != 404:
            raise
        return None


async def _lease(api: KubeApi, pod: Object | None) -> Object | Unreadable | None:
    """The operator's lease; None if it was told of none."""
    names = arguments(pod, "--lease") if pod is not None else set()
    if not names:
        return None
    namespace, _, name = min(names).partition("/")
    return await _read(_there(api, f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"))


async def _slices(api: KubeApi, pod: Object | None) -> list[Any] | Unreadable:
    """The EndpointSlices that name the operator's pod, whatever its Service is called."""
    if pod is None:
        return Unreadable("no operator was found")
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    found = await _read(api.listed(f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"))
    if isinstance(found, Unreadable):
        return found
    return [one for one in found if any(_is_of(endpoint, name) for endpoint in one.get("endpoints") or ())]


def _is_of(endpoint: Mapping[str, Any], pod: str) -> bool:
    return (endpoint.get("targetRef") or {}).get("name") == pod


async def _own_rights(api: KubeApi, namespace: str) -> dict[Right, bool]:
    rights = dict.fromkeys(right for needed in PERSON.values() for right in needed)
    return await _reviewed(api, "selfsubjectaccessreviews", "SelfSubjectAccessReview", rights, namespace, {})


async def _operator_rights(api: KubeApi, pod: Object | None, namespace: str) -> dict[Right, bool] | Unreadable:
    if pod is None:
        return Unreadable("no operator was found")
    account = pod["spec"].get("serviceAccountName") or "default"
    user = f"system:serviceaccount:{pod['metadata']['namespace']}:{account}"
    groups = [
        "system:serviceaccounts",
        f"system:serviceaccounts:{pod['metadata']['namespace']}",
        "system:authenticated",
    ]
    who = {"user": user, "groups": groups}
    return await _read(_reviewed(api, "subjectaccessreviews", "SubjectAccessReview", OPERATOR, namespace, who))


async def _reviewed(
    api: KubeApi, resource: str, kind: str, rights: Iterable[Right], namespace: str, who: Mapping[str, Any]
) -> dict[Right, bool]:
    """Which of the rights are there. who: whose they are; nothing for those of whoever asks."""

    async def one(right: Right) -> bool:
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": {**who, **_attributes(right, namespace)}}
        answer = await api.call("POST", f"{REVIEWS}/{resource}", body)
        return bool((answer.get("status") or {}).get("allowed"))

    rights = tuple(rights)
    return dict(zip(rights, await asyncio.gather(*(one(right) for right in rights)), strict=True))


def _attributes(right: Right, namespace: str) -> dict[str, Any]:
    resource, _, sub = right.resource.partition("/")
    attributes = {"verb": right.verb, "group": right.group, "resource": resource}
    attributes |= {"subresource": sub} if sub else {}
    attributes |= {"namespace": namespace} if right.namespaced else {}
    return {"resourceAttributes": attributes}


async def _claim(api: KubeApi, of_namespace: str, name: str | None) -> Object | Unreadable | None:
    return None if name is None else await _read(_there(api, f"{of_namespace}/persistentvolumeclaims/{name}"))


async def _queue(api: KubeApi, namespace: str, name: str | None) -> Object | Unreadable | None:
    """A LocalQueue of Kueue."""
    path = f"/apis/{KUEUE}/v1beta2/namespaces/{namespace}/localqueues/{name}"
    return None if name is None else await _read(_there(api, path))
