"""Which API server the operator works with, and as whom: its ServiceAccount in a cluster, else a kubeconfig."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
import kopf

from bamboo_core.kube.credentials import Credentials
from bamboo_core.kube.kubeconfig import ACCOUNT, Access, in_cluster, load

TOKEN_FILE, AUTHORITY_FILE, NAMESPACE_FILE = ACCOUNT / "token", ACCOUNT / "ca.crt", ACCOUNT / "namespace"
USUAL = {"KUBERNETES_SERVICE_HOST": "kubernetes.default.svc", "KUBERNETES_SERVICE_PORT": "443"}


def operator_access(environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Access:
    """The pod's ServiceAccount in a cluster, else KUBECONFIG. Raises ConfigError if there is neither.

    In a pod the server is the one that the kubelet names: it is reached also while the cluster's DNS is away.
    """
    return in_cluster({**USUAL, **environment}, account) or load(environment=environment)


class KopfSession(kopf.AiohttpSession):
    """The sessions with which kopf asks that server: it closes one, and may take another one while it ends.

    Two are equal if they show the same credentials: kopf tries none again that the server has refused.
    """

    _shown: tuple[tuple[tuple[str, str], ...], str | None]
    _make: Callable[[], aiohttp.ClientSession]

    def __init__(self, access: Access, credentials: Credentials, trace: aiohttp.TraceConfig) -> None:
        headers, tls, proxy = credentials.headers(), credentials.tls(), access.server.proxy

        def make() -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(ssl=tls, limit=0)
            return aiohttp.ClientSession(connector=connector, headers=headers, proxy=proxy, trace_configs=[trace])

        shown = tuple(headers), credentials.certificate
        self.__dict__.update(server=access.server.url, _shown=shown, _make=make)  # as others are, it is frozen

    @property
    def aiohttp_session(self) -> aiohttp.ClientSession:
        """A new one."""
        return self._make()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KopfSession) and self._shown == other._shown

    def __hash__(self) -> int:
        return hash(self._shown)


async def kopf_session(access: Access, trace: aiohttp.TraceConfig) -> KopfSession:
    """Return kopf's own way to that server, as the same user as all other calls, also with a plugin's credentials.

    trace: follows its requests. Each call reads the credentials, or runs the plugin: kopf logs in at the start, and
    whenever the server refuses what it has (401). Raises a RemoteError.
    """
    credentials = Credentials(access)
    await credentials.renew()
    return KopfSession(access, credentials, trace)
