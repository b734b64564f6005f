"""One fake node: its registration, heartbeats and addresses."""

import asyncio
import logging
import time
from datetime import UTC, datetime
from enum import StrEnum

from cluster.api import MERGE, STRATEGIC, Api, ApiError, Failure, Json
from cluster.nodes import CAPACITY, NodeSpec
from cluster.pod_status import now

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
LATE_SECONDS = 3.0
DOUBT_SECONDS = 20.0
LEASE_SECONDS = 40
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
INFO = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion", "kubeProxyVersion")


class Mode(StrEnum):
    UP = "Up"
    FAILED = "Failed"


class Node:
    """A fake node. index, subnet: 1 to 249; its addresses are 127.INDEX.SUBNET.*. version: such as v1.36.2."""

    def __init__(self, api: Api, spec: NodeSpec, index: int, subnet: int, log_port: int, version: str) -> None:
        self.api, self.spec, self.log_port, self.version = api, spec, log_port, version
        self.mode = Mode.UP
        self.allocatable = {**CAPACITY, **spec.capacity}
        self._prefix, self._next = f"127.{index}.{subnet}", 0

    @property
    def path(self) -> str:
        return f"/api/v1/nodes/{self.spec.name}"

    @property
    def address(self) -> str:
        return f"{self._prefix}.1"

    def next_address(self) -> str:
        """Return the next pod's address. A node has 252 of them; the 253rd pod gets the first pod's."""
        self._next += 1
        return f"{self._prefix}.{2 + (self._next - 1) % 252}"

    async def register(self) -> None:
        """Register the node as a kubelet does at its start: an existing node keeps its taints and labels."""
        labels = {
            "kubernetes.io/hostname": self.spec.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.spec.labels,
        }
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.spec.name, "labels": labels},
            "spec": {"taints": [dict(taint) for taint in self.spec.taints]},
        }
        try:
            await self.api.request("POST", "/api/v1/nodes", body)
        except ApiError as error:
            if error.code != 409:
                raise
        await self._say_ready()
        await self._renew()

    async def _say_ready(self) -> None:
        await self.api.request("PATCH", f"{self.path}/status", {"status": self._status()}, content=STRATEGIC)

    async def beat(self) -> None:
        """Send heartbeats forever.

        After a late or failed heartbeat, each heartbeat also reports for DOUBT_SECONDS that the node is ready.
        """
        doubted = 0.0
        while True:
            began = time.monotonic()
            try:
                await self._renew()
                if began < doubted:
                    await self._say_ready()
            except Failure as error:
                logger.warning("heartbeat of %s: %r", self.spec.name, error)
                doubted = time.monotonic() + DOUBT_SECONDS
            if time.monotonic() - began > LATE_SECONDS:
                doubted = time.monotonic() + DOUBT_SECONDS
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _renew(self) -> None:
        spec: Json = {"renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
        try:
            await self.api.request("PATCH", f"{LEASES}/{self.spec.name}", {"spec": spec}, content=MERGE)
        except ApiError as error:
            if error.code != 404:
                raise
            spec |= {"holderIdentity": self.spec.name, "leaseDurationSeconds": LEASE_SECONDS}
            await self.api.request("POST", LEASES, {"metadata": {"name": self.spec.name}, "spec": spec})

    def _status(self) -> Json:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        pressure = [{"type": f"{kind}Pressure", "status": "False"} for kind in ("Memory", "Disk", "PID")]
        times = {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
        empty = dict.fromkeys(INFO, "")
        return {
            "capacity": self.allocatable,
            "allocatable": self.allocatable,
            "addresses": [
                {"type": "InternalIP", "address": self.address},
                {"type": "Hostname", "address": self.spec.name},
            ],
            "conditions": [{**condition, **times} for condition in (ready, *pressure)],
            "nodeInfo": {
                **empty,
                "operatingSystem": "linux",
                "architecture": "amd64",
                "kubeletVersion": f"{self.version}-process",
            },
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.log_port}},
        }
