"""Kueue's own manager as a process of this machine, on the test cluster, with its integration of plain pods.

BAMBOO_KUEUE names a folder with `manager`, Kueue's program, and `manifests.yaml`, what its chart renders for the
namespace kueue-system (docs/testing-cluster.md). Its webhooks are called by address: there is no Service here.
"""

import base64
import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trustme
import yaml

from cluster.client import ApiError, Client, Json
from cluster.handle import Cluster

GIVEN = "BAMBOO_KUEUE"
SYSTEM = "kueue-system"
ACCOUNT = "kueue-controller-manager"
API = "kueue.x-k8s.io/v1beta2"
LEFT_OUT = ("APIService", "Deployment", "Service", "Secret", "ConfigMap")  # what needs pods and a network
STOP_SECONDS = 30
# Where it looks for the certificate of its metrics cannot be chosen, so it gets an /etc of its own.
CERTIFICATES = "/etc/kueue/metrics/certs"
OWN_ETC = (
    f'mount -t tmpfs tmpfs /etc && mkdir -p {CERTIFICATES} && cp "$1"/tls.* {CERTIFICATES} && shift &&'
    ' exec setpriv --pdeathsig KILL -- "$@"'
)


def given() -> Path | None:
    """The folder, if there is one."""
    return Path(os.environ[GIVEN]) if os.environ.get(GIVEN) else None


@contextlib.contextmanager
def kueue(cluster: Cluster, source: Path, folder: Path) -> Iterator[None]:
    """It runs, and admits pods. The cluster has to end with it: its webhooks are asked for every pod."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, health = int(free.getsockname()[1]), int(other.getsockname()[1])
    authority = trustme.CA()
    mine = authority.issue_cert("127.0.0.1")
    mine.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    mine.private_key_pem.write_to_path(folder / "tls.key")
    bundle = base64.b64encode(authority.cert_pem.bytes()).decode()

    hooks = []
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    for manifest in filter(None, yaml.safe_load_all((source / "manifests.yaml").read_text())):
        _by_address(manifest, f"https://127.0.0.1:{port}", bundle)
        if manifest["kind"].endswith("WebhookConfiguration"):
            manifest["metadata"].pop("namespace", None)  # which such an object has not
            hooks.append(manifest)
        elif manifest["kind"] not in LEFT_OUT:
            _create(cluster.api, manifest)

    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(port, health, folder)))
    kubeconfig = cluster.service_account_kubeconfig(SYSTEM, ACCOUNT, folder / "kueue.kubeconfig")
    run = [str(source / "manager"), f"--config={config}", "--feature-gates=VisibilityOnDemand=false"]
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", OWN_ETC, "sh", str(folder), *run]
    with (folder / "kueue.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=log, stderr=log)
    try:
        for hook in hooks:
            _create(cluster.api, hook)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()
        print((folder / "kueue.log").read_text()[-20_000:])


def _config(port: int, health: int, folder: Path) -> Json:
    """Plain pods only. Processors and memory have no quota here."""
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["pod"]},
        "resources": {"excludeResourcePrefixes": ["cpu", "memory"]},
    }


def _by_address(manifest: Json, url: str, bundle: str) -> None:
    """Webhooks are at an address instead of a Service."""

    def changed(client: Json) -> Json:
        return {"url": url + client["service"]["path"], "caBundle": bundle}

    for hook in manifest.get("webhooks") or ():
        hook["clientConfig"] = changed(hook["clientConfig"])
    conversion: dict[str, Any] = (manifest.get("spec") or {}).get("conversion") or {}
    if "webhook" in conversion:
        conversion["webhook"]["clientConfig"] = changed(conversion["webhook"]["clientConfig"])


def _create(api: Client, manifest: Json) -> None:
    try:
        api.create(manifest)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise


def queue(api: Client, namespace: str, gpus: int) -> str:
    """A queue of that namespace with a quota of so many GPUs; its name, which the ClusterQueue has, too.

    Whoever is more important takes the GPUs of others.
    """
    name = f"queue-{namespace}"
    _create(api, {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "default"}})
    flavor = {"name": "default", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": gpus}]}
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [{"coveredResources": ["nvidia.com/gpu"], "flavors": [flavor]}],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    _create(api, {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec})
    local = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": name}}
    api.create(local, namespace)
    return name


def set_quota(api: Client, name: str, gpus: int) -> None:
    flavor = {"name": "default", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": gpus}]}
    groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": [flavor]}]
    api.patch(f"/apis/{API}/clusterqueues/{name}", {"spec": {"resourceGroups": groups}})
