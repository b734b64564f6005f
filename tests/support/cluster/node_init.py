"""The first process of a real node, in namespaces of its own: `python node_init.py SETTINGS`, standard library only.

SETTINGS is a JSON file. The process turns its namespaces into a node, keeps containerd and the kubelet running, and
adopts orphans. If it is killed, the kernel removes the node's processes, mounts and interfaces, as in a power cut.
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOCKET = "/run/containerd/containerd.sock"
AGAIN_SECONDS, POLL_SECONDS = 0.5, 0.1
# A kubelet sets these for the whole machine. It finds them set here, and the machine's stay as they are.
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    name: str
    address: str  # with the length of its prefix
    gateway: str
    routes: dict[str, str]  # to the pods of other nodes: a network, and the address of its node
    folder: str  # has var, the node's disk, and gets the logs of the programs
    programs: dict[str, list[str]]  # command lines by name
    images: list[str]  # archives to import before the kubelet starts


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def set_up_files(settings: Settings) -> None:
    socket.sethostname(settings.name)
    mount("--make-rshared", "/")  # for pods whose mounts are to be seen in their node
    var = Path(settings.folder, "var")
    for folder in ("lib", "log", "tmp", "cache"):
        (var / folder).mkdir(parents=True, exist_ok=True)
    if not (var / "run").is_symlink():
        (var / "run").symlink_to("/run")
    mount("--bind", str(var), "/var")
    mount("-t", "tmpfs", "tmpfs", "/run")
    names = Path(os.path.realpath("/etc/resolv.conf"))  # may be in /run
    names.parent.mkdir(parents=True, exist_ok=True)
    names.touch()
    mount("--bind", f"{settings.folder}/resolv.conf", str(names))
    for name, value in SYSCTLS.items():
        file = Path("/run/sysctl", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        mount("--bind", str(file), f"/proc/sys/{name}")


def set_up_network(settings: Settings) -> None:
    while "eth0" not in (name for _, name in socket.if_nameindex()):
        time.sleep(0.02)
    lines = [
        "link set lo up",
        "link set eth0 up",
        f"address add {settings.address} dev eth0",
        f"route add default via {settings.gateway}",
        "route add unreachable 169.254.0.0/16",  # where clouds tell a kubelet about itself: it need not wait for them
        *(f"route add {network} via {node}" for network, node in settings.routes.items()),
    ]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def import_images(settings: Settings) -> None:
    while subprocess.run(["ctr", "--connect-timeout", "1s", "version"], capture_output=True).returncode:
        time.sleep(0.05)
    for image in settings.images:
        subprocess.run(["ctr", "--namespace", "k8s.io", "images", "import", image], check=True)


class Programs:
    """The node's containerd and kubelet; `keep_up` starts each of them again whenever it ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pids: dict[int, str] = {}
        self._due: dict[str, float] = {}

    def start(self, name: str) -> None:
        with Path(self._settings.folder, f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self._settings.programs[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._pids[process.pid] = name
        process.returncode = 0  # this class waits for it, not the object, which would warn of a process that runs

    def keep_up(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            self._reap()
            for name, due in list(self._due.items()):
                if time.monotonic() >= due:
                    del self._due[name]
                    self.start(name)

    def _reap(self) -> None:
        while (pid := _ended()) is not None:
            if (name := self._pids.pop(pid, None)) is not None:
                self._due[name] = time.monotonic() + AGAIN_SECONDS


def _ended() -> int | None:
    try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return pid or None


def main() -> None:
    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    settings = Settings(**given)
    set_up_files(settings)
    set_up_network(settings)
    programs = Programs(settings)
    programs.start("containerd")
    import_images(settings)
    programs.start("kubelet")
    programs.keep_up()


if __name__ == "__main__":
    main()
