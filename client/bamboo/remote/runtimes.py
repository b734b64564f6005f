"""The runtime that a job names, as the cluster has it."""

import asyncio

from bamboo_core.job.fields import ManifestError
from bamboo_core.job.runtime import Runtime, parse_runtime
from bamboo_core.job.spec import RuntimeKind, RuntimeRef
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.kube.kubeconfig import Access

SECONDS = 5.0  # for a command that needs no cluster


async def runtime_of(api: KubeApi, ref: RuntimeRef, namespace: str) -> Runtime:
    """The runtime that a job of that namespace names. Raises RemoteError, also if it is not valid."""
    place = namespace if ref.kind is RuntimeKind.NAMESPACE else ""
    try:
        body = await api.runtime(ref.kind, place, ref.name)
    except ApiError as error:
        raise RemoteError(f"there is no {ref} yet" if error.status == 404 else str(error)) from None
    try:
        return parse_runtime({name: body[name] for name in ("apiVersion", "kind", "metadata", "spec")})
    except ManifestError as error:
        raise RemoteError(f"{ref} is not valid: {'; '.join(map(str, error.problems))}") from None


async def runtime_in_reach(access: Access, ref: RuntimeRef, namespace: str) -> Runtime:
    """The same, if the cluster answers at once. Raises RemoteError."""
    try:
        async with asyncio.timeout(SECONDS), KubeApi(access) as api:
            return await runtime_of(api, ref, namespace)
    except TimeoutError:
        raise RemoteError(f"the cluster did not answer within {SECONDS:.0f} s") from None
