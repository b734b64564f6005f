"""A Kubernetes control plane as local processes: etcd, API server, controller manager and scheduler."""

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from cluster import build, children, kubeconfig, pki
from cluster.api import Api, ApiError

HOST = "127.0.0.1"
START_SECONDS = 180
STOP_SECONDS = 5
# Kubernetes' defaults are 5 s, 40 s and 300 s: too long for a test.
NODE_MONITOR_PERIOD = "1s"
NODE_MONITOR_GRACE = "7s"
UNREACHABLE_TOLERATION_SECONDS = 3
SECURE_ONLY = 24  # since this minor version: no ports without TLS, no Secrets of ServiceAccounts
SUBJECTS = {
    "admin": "/O=system:masters/CN=admin",
    "kubelet": "/O=system:masters/CN=process-kubelet",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
}


class StartFailed(Exception):
    """Raised if the control plane does not start. The message contains the ends of the components' logs."""


class ControlPlane:
    """A control plane. folder: for kubeconfig files, certificates, logs and etcd's data. programs: from
    build.binaries(). host: the API server's IP address; the other components listen on loopback.
    """

    def __init__(self, folder: Path, programs: Path, host: str = HOST) -> None:
        self.folder, self.programs, self.host = folder, programs, host
        self.children: dict[str, children.Child] = {}
        self._flags: dict[str, tuple[str, ...]] = {}
        self._ports = dict(zip(("api", "etcd", "peer", "manager", "scheduler"), free_ports(5), strict=True))
        self.pki: pki.Pki

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self._ports["api"]

    @property
    def server(self) -> str:
        return f"https://{self.host}:{self._ports['api']}"

    def kubeconfig(self, name: str) -> Path:
        return self.folder / f"{name}.kubeconfig"

    async def start(self) -> None:
        minor = await asyncio.to_thread(build.minor_version, self.programs / "kube-apiserver")
        self.pki = await asyncio.to_thread(pki.create, self.folder / "pki", SUBJECTS, self.host)
        self._write_kubeconfigs(self.pki)
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(Api(self.kubeconfig("admin")))
            await self._spawn("etcd", *etcd_flags(self.folder, self._ports))
            await self._spawn("kube-apiserver", *api_server_flags(self.pki, self._ports, minor, self.host))
            await self._until("the API server", api, "/readyz")
            await self._spawn("kube-controller-manager", *self._manager_flags(self.pki, minor))
            await self._spawn("kube-scheduler", *self._scheduler_flags(minor))
            await self._until(
                "the default ServiceAccount",
                api,
                "/api/v1/namespaces/default/serviceaccounts/default",
                lambda text: minor >= SECURE_ONLY or '"secrets"' in text,
            )
            await self._until("the roles", api, "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:kube-scheduler")

    async def stop(self) -> None:
        for name in reversed(self.children):
            await children.stop(self.children[name], STOP_SECONDS)
        self.children.clear()

    def fallen(self) -> str | None:
        """Return the name of a component that has ended though it should run, or None."""
        ended = (name for name, child in self.children.items() if child.process.returncode is not None)
        return next(ended, None)

    def tails(self) -> str:
        logs = [(name, children.tail(child.log)) for name, child in self.children.items()]
        return "\n".join(f"--- {name}\n{text}" for name, text in logs)

    def _write_kubeconfigs(self, made: pki.Pki) -> None:
        ca = made.authority.certificate.read_text()
        for name, pair in made.clients.items():
            user = {"client-certificate-data": pair.certificate.read_text(), "client-key-data": pair.key.read_text()}
            kubeconfig.write(self.kubeconfig(name), server=self.server, ca=ca, user=user)

    async def _spawn(self, name: str, *flags: str) -> None:
        self._flags[name] = flags
        argv = [str(self.programs / name), *flags]
        log = self.folder / f"{name}.log"
        env = {**os.environ, "GOGC": "500"}  # memory is there; a fifth of the API server's start was Go's collector
        self.children[name] = await children.start(argv, log, env=env, folder=str(self.folder))

    async def take_down(self, component: str) -> None:
        """End a component, which stays down until `bring_up`."""
        await children.stop(self.children.pop(component), STOP_SECONDS)

    async def bring_up(self, component: str) -> None:
        """Start a component again, with the same flags, unless it is up."""
        if component not in self.children:
            await self._spawn(component, *self._flags[component])

    async def _until(self, what: str, api: Api, path: str, good: Callable[[str], bool] = bool) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            if name := self.fallen():
                raise StartFailed(f"{name} ended while starting\n{self.tails()}")
            if time.monotonic() > end:
                raise StartFailed(f"{what} was not ready after {START_SECONDS} s\n{self.tails()}")
            try:
                if good(await api.text("GET", path)):
                    return
            except (ApiError, aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.05)

    def _manager_flags(self, made: pki.Pki, minor: int) -> list[str]:
        # Left out: controllers that need a cloud, and controllers of features that the process kubelet lacks.
        off = (
            "ttl",
            "nodeipam",
            "service",
            "route",
            "cloud-node-lifecycle",
            "attachdetach",
            "persistentvolume-expander",
        )
        return [
            f"--kubeconfig={self.kubeconfig('controller-manager')}",
            "--leader-elect=false",
            f"--bind-address={HOST}",
            f"--secure-port={self._ports['manager']}",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={made.service_account_key}",
            f"--root-ca-file={made.authority.certificate}",
            f"--node-monitor-period={NODE_MONITOR_PERIOD}",
            f"--node-monitor-grace-period={NODE_MONITOR_GRACE}",
            "--node-eviction-rate=100",
            "--secondary-node-eviction-rate=100",
            "--unhealthy-zone-threshold=1.0",
            "--pvclaimbinder-sync-period=1s",
            f"--controllers=*,{','.join('-' + name for name in off)}",
            *no_insecure_port("port", minor),
        ]

    def _scheduler_flags(self, minor: int) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig('scheduler')}",
            "--leader-elect=false",
            f"--bind-address={HOST}",
            f"--secure-port={self._ports['scheduler']}",
            *no_insecure_port("port", minor),
        ]


def etcd_flags(folder: Path, ports: dict[str, int]) -> list[str]:
    client, peer = (f"http://{HOST}:{ports[name]}" for name in ("etcd", "peer"))
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--log-level=error",
    ]


def no_insecure_port(flag: str, minor: int) -> list[str]:
    """Return the flag that closes a component's port without TLS; [] from version 1.24 on, which has no such port."""
    return [] if minor >= SECURE_ONLY else [f"--{flag}=0"]


def api_server_flags(made: pki.Pki, ports: dict[str, int], minor: int, host: str) -> list[str]:
    """Return the API server's flags: Node and RBAC authorization, NodeRestriction and the default admission plugins."""
    headers = {"username": "X-Remote-User", "group": "X-Remote-Group", "extra": "X-Remote-Extra-"}
    return [
        f"--etcd-servers=http://{HOST}:{ports['etcd']}",
        f"--bind-address={host}",
        f"--secure-port={ports['api']}",
        f"--advertise-address={host}",
        *(["--endpoint-reconciler-type=none"] if host == HOST else []),  # it refuses to be an endpoint on loopback
        f"--tls-cert-file={made.server.certificate}",
        f"--tls-private-key-file={made.server.key}",
        f"--client-ca-file={made.authority.certificate}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={made.service_account_public}",
        f"--service-account-signing-key-file={made.service_account_key}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--default-not-ready-toleration-seconds={UNREACHABLE_TOLERATION_SECONDS}",
        f"--default-unreachable-toleration-seconds={UNREACHABLE_TOLERATION_SECONDS}",
        f"--requestheader-client-ca-file={made.front_proxy_authority.certificate}",
        "--requestheader-allowed-names=front-proxy",
        f"--requestheader-username-headers={headers['username']}",
        f"--requestheader-group-headers={headers['group']}",
        f"--requestheader-extra-headers-prefix={headers['extra']}",
        f"--proxy-client-cert-file={made.front_proxy.certificate}",
        f"--proxy-client-key-file={made.front_proxy.key}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={made.clients['admin'].certificate}",
        *no_insecure_port("insecure-port", minor),
        f"--kubelet-client-key={made.clients['admin'].key}",
    ]


def free_ports(count: int) -> list[int]:
    """Return free TCP ports below the kernel's range for clients, so that no client takes a port before its use."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
