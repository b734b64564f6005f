"""A real Kubernetes control plane with many fake nodes, and counts of the operator's requests, from the API server's
audit log. Instead of kubelets, `_fleet` handles the pods and `report_nodes` the nodes' status.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from _common import say

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from certificates import issue  # type: ignore[import-not-found]
from cluster import build  # type: ignore[import-not-found]
from cluster.api import MERGE, STRATEGIC, Api, ApiError  # type: ignore[import-not-found]
from cluster.control_plane import ControlPlane, free_ports  # type: ignore[import-not-found]
from cluster.handle import Cluster  # type: ignore[import-not-found]
from cluster.nodes import CAPACITY, ZONE  # type: ignore[import-not-found]
from operator_process import LEASE, SYSTEM, install, stand_in  # type: ignore[import-not-found]

__all__ = [
    "LEASE",
    "MERGE",
    "STRATEGIC",
    "SYSTEM",
    "Api",
    "ApiError",
    "Cluster",
    "Plane",
    "free_ports",
    "issue",
    "plane",
    "stand_in",
]

Json = dict[str, Any]
ACCOUNT = f"system:serviceaccount:{SYSTEM}:bamboo-operator"
AT_ONCE = 50  # nodes
NODE_REPORT_SECONDS = 300.0  # seconds between a kubelet's writes of an unchanged node status


class Plane(ControlPlane):  # type: ignore[misc]
    """A control plane with high request limits. Nodes need no leases, since they may be silent for a day."""

    async def _spawn(self, name: str, *flags: str) -> None:
        await super()._spawn(name, *flags, *self._more().get(name, ()))

    def _more(self) -> dict[str, list[str]]:
        return {
            "kube-apiserver": [
                f"--audit-log-path={self.audit}",
                f"--audit-policy-file={self.policy}",
                "--max-requests-inflight=2000",
                "--max-mutating-requests-inflight=1000",
            ],
            "kube-controller-manager": [
                "--node-monitor-grace-period=24h",
                "--kube-api-qps=300",
                "--kube-api-burst=300",
            ],
            "kube-scheduler": ["--kube-api-qps=300", "--kube-api-burst=300"],
        }

    @property
    def audit(self) -> Path:
        return Path(self.folder) / "audit.log"

    @property
    def policy(self) -> Path:
        return Path(self.folder) / "audit-policy.json"

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.kubeconfig("admin"))

    def api(self) -> Api:
        return Api(self.kubeconfig("admin"))

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items()}

    def calls(self, since: float, until: float) -> Counter[tuple[str, str]]:
        """Count the operator's requests between two values of time.time(), by client (operator, kopf) and kind."""
        counts: Counter[tuple[str, str]] = Counter()
        for entry in map(json.loads, self.audit.read_text().splitlines()):
            watch = entry["verb"] == "watch"
            if entry["stage"] != ("ResponseStarted" if watch else "ResponseComplete"):
                continue
            if since <= _seconds(entry["requestReceivedTimestamp"]) < until:
                counts[(_client(entry), _what(entry))] += 1
        return counts


def _client(entry: Json) -> str:
    return "operator" if entry.get("userAgent") == "bamboo-operator" else "kopf"


def _what(entry: Json) -> str:
    place = entry.get("objectRef") or {}
    if not place:
        return "discovery"
    name = "/".join(filter(None, [place.get("resource"), place.get("subresource")]))
    return f"{entry['verb']} {name}" + (" (dry run)" if "dryRun" in entry["requestURI"] else "")


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@asynccontextmanager
async def plane(folder: Path, nodes: int) -> AsyncIterator[Plane]:
    """Run a control plane for the block, with the CRD, the operator's rights, and `nodes` ready nodes."""
    programs = build.binaries()
    found = Plane(folder, programs)
    rules = [{"level": "Metadata", "users": [ACCOUNT], "omitStages": ["RequestReceived"]}, {"level": "None"}]
    found.policy.write_text(json.dumps({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
    try:
        began = time.monotonic()
        await found.start()
        await asyncio.to_thread(install, found.cluster)
        async with found.api() as api:
            for first in range(0, nodes, AT_ONCE):
                last = min(first + AT_ONCE, nodes)
                await asyncio.gather(*(_add_node(api, index) for index in range(first, last)))
        say(f"the control plane and {nodes} nodes took {time.monotonic() - began:.0f} s")
        yield found
    finally:
        await found.stop()


def node_name(index: int) -> str:
    return f"node-{index:04}"


async def _add_node(api: Api, index: int) -> None:
    name = node_name(index)
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        ZONE: f"zone-{'abc'[index % 3]}",
        "karpenter.sh/capacity-type": "spot",
    }
    await api.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
    status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready()]}
    await api.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, content=STRATEGIC)


def ready() -> Json:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kind = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
    return {**kind, "lastHeartbeatTime": now}


async def report_nodes(api: Api, nodes: int) -> None:
    """Write every node's status once in five minutes, forever, as kubelets do."""
    index = 0
    while True:
        await asyncio.sleep(NODE_REPORT_SECONDS / nodes)
        path = f"/api/v1/nodes/{node_name(index % nodes)}/status"
        await api.request("PATCH", path, {"status": {"conditions": [ready()]}}, content=STRATEGIC)
        index += 1
