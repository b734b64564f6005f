"""How the operator shows itself to the API server: its ServiceAccount in a cluster, else a kubeconfig."""

import base64
import os
import ssl
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import kopf

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where a pod has its ServiceAccount's files
TOKEN_FILE, AUTHORITY_FILE, NAMESPACE_FILE = ACCOUNT / "token", ACCOUNT / "ca.crt", ACCOUNT / "namespace"


def credentials(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo:
    """The pod's ServiceAccount in a cluster, else KUBECONFIG. Raises kopf.LoginError if there is neither."""
    inside = kopf.login_with_service_account(settings=settings)
    if inside is not None:
        return replace(inside, server=_server_from_within() or inside.server)
    info = kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise kopf.LoginError("no cluster: neither a ServiceAccount nor a kubeconfig (KUBECONFIG) is there")
    return info


def _server_from_within() -> str | None:
    """The API server as a kubelet tells its pods: it is reached also while the cluster's DNS is away."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def tls_context(info: kopf.ConnectionInfo) -> ssl.SSLContext | bool:
    """For the server's and our certificates, given as files or in base64."""
    if not info.server.startswith("https:"):
        return False
    authority = _text(info.ca_data)
    context = ssl.create_default_context(cafile=_path(info.ca_path), cadata=authority)
    if info.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if info.certificate_path and info.private_key_path:
        context.load_cert_chain(str(info.certificate_path), str(info.private_key_path))
    elif info.certificate_data and info.private_key_data:
        with tempfile.TemporaryDirectory(prefix="bamboo-operator-") as folder:  # ssl takes only files
            for name, data in (("cert", info.certificate_data), ("key", info.private_key_data)):
                file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(file, "w") as out:
                    out.write(_text(data) or "")
            context.load_cert_chain(f"{folder}/cert", f"{folder}/key")
    return context


def _path(path: Any) -> str | None:
    return None if path is None else str(path)


def _text(data: str | bytes | None) -> str | None:
    """PEM, which may come in base64."""
    if data is None:
        return None
    raw = data.encode() if isinstance(data, str) else data
    return (raw if raw.lstrip().startswith(b"-----") else base64.b64decode(raw)).decode()
