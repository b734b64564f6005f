"""The real operator in a process of its own, and the CPU time and memory of processes."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from _common import busy_seconds, say
from _plane import LEASE, SYSTEM, Cluster, free_ports, issue

STOP_SECONDS = 30
IDENTITY = "operator-0"  # in the Lease: its pod's name


class Operator:
    """A process that runs the operator."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process, self.log = process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory(self) -> tuple[float, float]:
        """Return the resident memory (RSS) and its highest value so far, in MiB."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
        return sizes["VmRSS"] / 1024, sizes["VmHWM"] / 1024

    def troubles(self) -> Iterator[str]:
        """Yield the log's lines that report an error, a failed action ("cannot") or the start of a traceback."""
        for line in self.log.read_text().splitlines():
            if " ERROR " in line or ": cannot " in line or line.startswith("Traceback"):
                yield line


@contextmanager
def running_operator(cluster: Cluster, folder: Path) -> Iterator[Operator]:
    """Run an operator for the block, under its own ServiceAccount and for all namespaces."""
    kubeconfig = cluster.service_account_kubeconfig(SYSTEM, "bamboo-operator", folder / "operator.kubeconfig", 7200)
    (folder / "key").write_bytes(secrets.token_bytes(32))
    command = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "bamboo_operator"]
    command += ["--listen", f"127.0.0.1:{free_ports(1)[0]}", "--web-listen", "127.0.0.1:0"]
    command += ["--key-file", str(folder / "key"), "--lease", f"{SYSTEM}/{LEASE}", *issue(folder)]
    command += ["--identity", IDENTITY]
    path = folder / "operator.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=log, stderr=log)
    try:
        yield Operator(process, path)
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"the operator did not end within {STOP_SECONDS} s")
    finally:
        process.kill()
        process.wait()


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Return each process's CPU seconds so far, by its name in `pids`, and those of all others as "others"."""
    ticks = os.sysconf("SC_CLK_TCK")
    busy, seconds = busy_seconds(), {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds[name] = sum(map(int, fields[11:13])) / ticks
    return {**seconds, "others": busy - sum(seconds.values())}
