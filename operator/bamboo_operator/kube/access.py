"""Which API server the operator works with, and as whom: its ServiceAccount in a cluster, else a kubeconfig."""

from collections.abc import Callable

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import ConfigException

from bamboo_core.complaints import said_by
from bamboo_core.kube.api import ACCOUNT, Access, Connection, in_cluster, log_in
from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_operator.kube.api_calls import ApiCallCounts

TOKEN_FILE, AUTHORITY_FILE, NAMESPACE_FILE = ACCOUNT / "token", ACCOUNT / "ca.crt", ACCOUNT / "namespace"
TIMEOUT_SECONDS = 10.0
API_CONNECTIONS = 32


async def operator_access() -> Access:
    """Return the access of the pod's ServiceAccount in a cluster, else of KUBECONFIG. Raises ConfigError."""
    return in_cluster() or await log_in()


def connect(access: Access, calls: ApiCallCounts, connections: int) -> Connection:
    """Return connections that count their calls. Who asked a busy server asks again after a pause of its own."""
    return Connection(
        access,
        agent="bamboo-operator",
        seconds=TIMEOUT_SECONDS,
        tries=1,
        connections=connections,
        ended=calls.ended,
    )


class KopfSession(kopf.AiohttpSession):
    """The sessions with which kopf asks that server: it closes one, and may take another one while it ends.

    Two are equal if they show the same credentials: kopf tries none again that the server has refused. A
    kopf.ConnectionInfo would not do: its sessions cannot be traced.
    """

    _shown: tuple[str | None, str | None]
    _make: Callable[[], aiohttp.ClientSession]

    def __init__(self, access: Access, header: str | None, trace: aiohttp.TraceConfig) -> None:
        configuration = access.configuration
        tls, options = ApiClient(configuration).rest_client.ssl_context, configuration.client_session_kwargs
        headers = {"Authorization": header} if header else {}

        def make() -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(ssl=tls, limit=0)
            return aiohttp.ClientSession(connector=connector, headers=headers, trace_configs=[trace], **options)

        shown = header, configuration.cert_file
        self.__dict__.update(server=configuration.host, _shown=shown, _make=make)  # as others are, it is frozen

    @property
    def aiohttp_session(self) -> aiohttp.ClientSession:
        """A new one."""
        return self._make()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KopfSession) and self._shown == other._shown

    def __hash__(self) -> int:
        return hash(self._shown)


async def kopf_session(access: Access, trace: aiohttp.TraceConfig) -> KopfSession:
    """Return kopf's own way to that server, as the same user as all other calls, with the token of this moment.

    trace: follows its requests. kopf logs in at the start, and whenever the server refuses what it has (401). Raises
    ClusterUnreachable.
    """
    try:
        header = await access.configuration.get_api_key_with_prefix("BearerToken")
    except (OSError, ConfigException) as error:
        raise ClusterUnreachable(f"the token cannot be read: {said_by(error)}") from None
    return KopfSession(access, header, trace)
