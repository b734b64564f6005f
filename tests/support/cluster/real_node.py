"""One real node: its files, its programs, its boot and its power cut."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import cgroups, children, kubeconfig, pki
from cluster.addresses import NODES, Addresses
from cluster.api import Json
from cluster.node import Mode
from cluster.nodes import NodeSpec
from cluster.switch import POLL_SECONDS, START_SECONDS, Switch, run

INIT = Path(__file__).with_name("node_init.py")
SOCKET = "unix:///run/containerd/containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"
# Kubernetes' minor versions that changed a kubelet's flags or settings.
ONE_RUNTIME, ENDPOINT_IS_A_FIELD, CGROUP_V1_IS_OLD = 24, 27, 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """A real node's programs. kubelet: its path. root: the folder that node.sh made. minor: the kubelet's version."""

    kubelet: Path
    root: Path
    minor: int

    def environment(self) -> dict[str, str]:
        """Return the variables with which the programs find each other and their libraries."""
        given = [str(self.kubelet.parent)]  # a newer containerd there comes before Debian's
        folders = [str(self.root / name) for name in ("usr/sbin", "usr/bin", "sbin", "bin")]
        libraries = next(self.root.glob("usr/lib/*-linux-gnu"))
        return {
            "PATH": os.pathsep.join([*given, *folders, "/usr/sbin", "/usr/bin", "/sbin", "/bin"]),
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
        }


class RealNode:
    """A real node: containerd and a kubelet in their own namespaces. spec: only its name is used.

    folder: contains the folders of all nodes. number: from addresses.NODES.
    """

    def __init__(self, spec: NodeSpec, number: int, folder: Path, programs: Programs, switch: Switch) -> None:
        self.spec, self.number, self.programs = spec, number, programs
        self.mode = Mode.UP
        self.folder = folder / spec.name
        self._switch, self._addresses = switch, switch.addresses
        self._outer: children.Child | None = None
        self._pid = 0

    @property
    def address(self) -> str:
        return self._addresses.node(self.number)

    @property
    def group(self) -> str:
        return self._addresses.group(self.number)

    def install(self, made: pki.Pki, server: str, images: Sequence[Path]) -> None:
        """Write the node's certificate and settings. server: the API server's URL. images: archives to import."""
        self.folder.mkdir(parents=True)
        pair = pki.client(made, f"node-{self.spec.name}", f"/O=system:nodes/CN=system:node:{self.spec.name}")
        user = {"client-certificate-data": pair.certificate.read_text(), "client-key-data": pair.key.read_text()}
        ca = made.authority.certificate
        kubeconfig.write(self.folder / "kubeconfig", server=server, ca=ca.read_text(), user=user)
        (self.folder / "resolv.conf").write_text(f"nameserver {self._addresses.machine}\n")
        (self.folder / "containerd.toml").write_text(containerd_settings(self.folder, self.programs.root))
        (self.folder / "network").mkdir()
        network = network_settings(self._addresses.pods(self.number))
        (self.folder / "network" / "pods.conflist").write_text(json.dumps(network))
        settings = kubelet_settings(self.programs.minor, self.group, self.folder, ca, self._addresses)
        (self.folder / "kubelet.json").write_text(json.dumps(settings))
        others = [number for number in NODES if number != self.number]
        settings = {
            "name": self.spec.name,
            "address": f"{self.address}/24",
            "gateway": self._addresses.machine,
            "routes": {self._addresses.pods(number): self._addresses.node(number) for number in others},
            "folder": str(self.folder),
            "programs": {
                "containerd": ["containerd", "--config", str(self.folder / "containerd.toml")],
                "kubelet": kubelet_command(self.programs, self.spec, self.folder, self.address),
            },
            "images": [str(image) for image in images],
        }
        (self.folder / "init.json").write_text(json.dumps(settings))

    async def boot(self) -> None:
        """Start the node's first process and connect the node to the switch. The kubelet starts later."""
        cgroups.create(self.group)
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc")
        unshare = ["unshare", *kinds, "--fork", "--kill-child", "--propagation", "private", "--mount-proc"]
        argv = [*unshare, sys.executable, "-I", "-S", str(INIT), str(self.folder / "init.json")]
        env = {"HOME": "/root", **self.programs.environment()}
        self._outer = await children.start(argv, self.folder / "init.log", env=env)
        self._pid = await self._first_process(self._outer)
        cgroups.enter(self.group, self._pid)
        await self._switch.plug_in(self.number, self._pid)

    async def _first_process(self, outer: children.Child) -> int:
        """Wait for the node's first process, which starts once the namespaces exist, and return its id."""
        listed = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        async with asyncio.timeout(START_SECONDS):
            while not (found := listed.read_text().split()):
                await asyncio.sleep(POLL_SECONDS)
        return int(found[0])

    def has_ended(self) -> bool:
        """Return whether the node has ended by itself, which it never should."""
        on = self._outer is not None and self.mode is not Mode.FAILED
        return on and self._outer.process.returncode is not None

    async def cut_power(self) -> None:
        """Kill all processes of the node at once, and remove its interface, mounts and cgroup."""
        assert self._outer is not None
        await self._switch.unplug(self.number)
        os.kill(self._pid, signal.SIGKILL)
        await self._outer.wait()
        self._outer = None
        await asyncio.to_thread(cgroups.remove, self.group)

    def discard(self) -> None:
        shutil.rmtree(self.folder)

    async def filter(self, rules: str) -> None:
        """Apply an nft script in the node's network namespace."""
        variables = [f"{name}={value}" for name, value in self.programs.environment().items()]
        await run("env", *variables, "nsenter", f"--net=/proc/{self._pid}/ns/net", "nft", "-f", "-", given=rules)


def containerd_settings(folder: Path, root: Path) -> str:
    return f"""
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{root}/usr/lib/cni"
  conf_dir = "{folder}/network"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


def network_settings(pods: str) -> Json:
    """Return the CNI configuration: every pod has a link of its own to the node, so that the node routes all traffic
    between pods.
    """
    addresses = {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": addresses}]}


def kubelet_settings(minor: int, group: str, folder: Path, authority: Path, addresses: Addresses) -> Json:
    """Return the KubeletConfiguration for a kubelet of this minor version, without fields that it does not know."""
    settings: Json = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "failSwapOn": False,
        "resolvConf": str(folder / "resolv.conf"),
        "clusterDomain": "cluster.local",
        "clusterDNS": [addresses.machine],
        "nodeLeaseDurationSeconds": 4,
        "nodeStatusUpdateFrequency": "1s",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    }
    if minor >= ENDPOINT_IS_A_FIELD:
        settings["containerRuntimeEndpoint"] = SOCKET
    if minor >= CGROUP_V1_IS_OLD:
        settings["failCgroupV1"] = False
    return settings


def kubelet_command(programs: Programs, spec: NodeSpec, folder: Path, address: str) -> list[str]:
    command = [
        str(programs.kubelet),
        f"--config={folder / 'kubelet.json'}",
        f"--kubeconfig={folder / 'kubeconfig'}",
        "--root-dir=/var/lib/kubelet",
        "--cert-dir=/var/lib/kubelet/pki",
        f"--hostname-override={spec.name}",
        f"--node-ip={address}",
    ]
    if programs.minor < ONE_RUNTIME:
        command.append("--container-runtime=remote")
    if programs.minor < ENDPOINT_IS_A_FIELD:
        command.append(f"--container-runtime-endpoint={SOCKET}")
    return command
