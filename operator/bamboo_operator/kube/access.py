"""The operator's access to the API server: by its ServiceAccount in a cluster, else by a kubeconfig."""

from collections import Counter
from dataclasses import dataclass, field

import kopf
from kubernetes.aio.config import ConfigException

from bamboo_core.complaints import said_by
from bamboo_core.histogram import Histogram
from bamboo_core.kube.api import ACCOUNT, Access, Connection, in_cluster, log_in
from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_core.metrics.catalog import OPERATOR_API_DURATION


@dataclass(slots=True)
class ApiCallCounts:
    """Counts and durations of calls to the API server. requests: by verb, resource and code. seconds: by verb and
    resource.
    """

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def ended(self, verb: str, path: str, code: str, seconds: float) -> None:
        """Count a call that has ended. code: the HTTP code of the answer, or "error" without an answer."""
        resource = resource_of(path)
        self.requests[verb, resource, code] += 1
        known = self.seconds.get((verb, resource)) or OPERATOR_API_DURATION.histogram()
        self.seconds[verb, resource] = known.having(seconds)


def resource_of(path: str) -> str:
    """Return the resource of an API path, without names: pods, bamboojobs/status."""
    parts = path.strip("/").split("/")
    if "namespaces" not in parts[:-2]:
        return parts[-1]
    kind, *rest = parts[parts.index("namespaces") + 2 :]
    return "/".join([kind, *rest[1:2]])


TOKEN_FILE, AUTHORITY_FILE, NAMESPACE_FILE = ACCOUNT / "token", ACCOUNT / "ca.crt", ACCOUNT / "namespace"
TIMEOUT_SECONDS = 10.0
API_CONNECTIONS = 32


async def operator_access() -> Access:
    """Return access to the API server: by a pod's ServiceAccount, else by a kubeconfig. Raises ConfigError."""
    return in_cluster() or await log_in()


def connect(access: Access, calls: ApiCallCounts, connections: int) -> Connection:
    """Return a client of the API server with at most this many connections. It counts its calls in `calls` and does not
    retry: callers pause by themselves if the API server is busy.
    """
    return Connection(
        access,
        agent="bamboo-operator",
        seconds=TIMEOUT_SECONDS,
        tries=1,
        connections=connections,
        ended=calls.ended,
    )


async def kopf_login(access: Access) -> kopf.ConnectionInfo:
    """Return the API server's address and the current credentials of `access`, in kopf's form. kopf logs in at
    the start and whenever the server rejects its token (401). Raises ClusterUnreachable.
    """
    configuration = access.configuration
    try:
        header = await configuration.get_api_key_with_prefix("BearerToken") or ""
    except (OSError, ConfigException) as error:
        raise ClusterUnreachable(f"the token cannot be read: {said_by(error)}") from None
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        token=header.partition(" ")[2] or None,  # after "Bearer", or "bearer" in a pod
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )
