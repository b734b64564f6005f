"""Functions that write kubeconfig files for the test cluster, and read those of any cluster, such as kind's."""

import base64
import json
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access to an API server: its URL, TLS settings with the client's certificate if any, and a token if any."""

    server: str
    tls: ssl.SSLContext
    token: str | None = None


def write(path: Path, *, server: str, ca: str, user: dict[str, str], namespace: str = "default") -> Path:
    """Write a kubeconfig to `path`, and return `path`. ca: in PEM. user: {"token": ...}, or
    {"client-certificate-data": PEM, "client-key-data": PEM}.
    """
    encoded = {key: value if key == "token" else _encode(value) for key, value in user.items()}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bamboo-test",
        "contexts": [
            {"name": "bamboo-test", "context": {"cluster": "bamboo-test", "user": "user", "namespace": namespace}}
        ],
        "clusters": [{"name": "bamboo-test", "cluster": {"server": server, "certificate-authority-data": _encode(ca)}}],
        "users": [{"name": "user", "user": encoded}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))
    return path


def read(path: Path) -> Access:
    cluster, user = parts(path)
    tls = ssl.create_default_context()
    if authority := _data(cluster, "certificate-authority", path):
        tls = ssl.create_default_context(cadata=authority)
    certificate, key = _data(user, "client-certificate", path), _data(user, "client-key", path)
    if certificate and key:
        with tempfile.NamedTemporaryFile("w") as file:  # the ssl module reads certificates from files only
            file.write(certificate + "\n" + key)
            file.flush()
            tls.load_cert_chain(file.name)
    return Access(server=cluster["server"].rstrip("/"), tls=tls, token=user.get("token"))


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cluster and the user of the current context."""
    config = yaml.safe_load(path.read_text())
    by_name = {kind: {entry["name"]: entry for entry in config[kind]} for kind in ("contexts", "clusters", "users")}
    context = by_name["contexts"][config["current-context"]]["context"]
    return by_name["clusters"][context["cluster"]]["cluster"], by_name["users"][context["user"]]["user"]


def authority(path: Path) -> str:
    cluster, _ = parts(path)
    return _data(cluster, "certificate-authority", path) or ""


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _data(section: dict[str, Any], name: str, path: Path) -> str | None:
    if f"{name}-data" in section:
        return base64.b64decode(section[f"{name}-data"]).decode()
    return (path.parent / section[name]).read_text() if name in section else None
