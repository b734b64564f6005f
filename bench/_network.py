"""Simulated machines: network namespaces whose only connection is `_switch`, which shapes it. A namespace belongs to a
process and ends with it, so nothing remains whatever happens. Needs Linux, and root or the right to make namespaces.
"""

import ctypes
import fcntl
import json
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _recorder
from _common import HERE
from _switch import CONTROL, MTU, Shape
from bamboo_trainer.stage.gradients import buckets
from bamboo_trainer.transport import stripes, wire
from bamboo_trainer.worker.agent import WorkerSettings

PATH = "BAMBOO_BENCH_NETWORK"  # the switch's socket
CUT = "cut"  # a file beside a worker's trace that makes the worker lose a connection and remove the file
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # for unshare(2)
TUN, NO_INFORMATION, SET_INTERFACE = 0x0001, 0x1000, 0x400454CA  # from linux/if_tun.h
START_SECONDS = 60.0
STREAM_SECONDS = 120.0


def enter(address: str) -> socket.socket:
    """Move this thread, and threads that it starts, to a namespace with this address, until the socket is closed.
    Raises RuntimeError if this machine does not permit it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (NEW_NETWORK, NEW_USER | NEW_NETWORK):
        if libc.unshare(flags) == 0:
            break
    else:
        reason = os.strerror(ctypes.get_errno())
        raise RuntimeError(f"network namespaces: {reason}; run this as root, or where users may make namespaces")
    try:
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH22x", b"bamboo0", TUN | NO_INFORMATION))
        for command in (
            "link set lo up",
            f"link set bamboo0 mtu {MTU} txqueuelen 2000 up",
            f"addr add {address}/24 dev bamboo0",
        ):
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=START_SECONDS)
    except FileNotFoundError as error:
        raise RuntimeError(f"network namespaces: {error.filename} is missing; `ip` is in iproute2") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"network namespaces: {error}") from None
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(START_SECONDS)
    channel.connect(os.environ[PATH])
    socket.send_fds(channel, [json.dumps({"join": address}).encode()], [device])
    channel.recv(4096)
    os.close(device)
    return channel


class Network:
    """The benchmark's handle on the switch."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def shape(self, shape: Shape) -> dict[str, float]:
        """Shape the network from now on; return the switch's counts of carried and dropped packets and time so far."""
        self._channel.send(json.dumps({"shape": asdict(shape)}).encode())
        counts: dict[str, float] = json.loads(self._channel.recv(4096))
        return counts


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Start the network and move this process's main thread into it, at the CONTROL address."""
    os.environ[PATH] = str(folder / "switch")
    command = [sys.executable, str(HERE / "_switch.py"), os.environ[PATH]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as switch:
        assert switch.stdin is not None
        assert switch.stdout is not None
        try:
            if switch.stdout.readline() != b"ready\n":
                raise RuntimeError("the switch did not start")
            with enter(CONTROL) as channel:
                yield Network(channel)
        finally:
            switch.stdin.close()


def address_of(worker: str) -> str:
    return f"10.77.0.{1 + int(worker.removeprefix('w'))}"


def time_steps(*, worker: str, trace: str, **started: Any) -> int:
    """Run a worker on a machine of its own. started: the launcher's other arguments of a worker."""
    stripes.send_body = _cutting(Path(trace).with_name(CUT))
    with enter(address_of(worker)):
        settings = WorkerSettings(host=address_of(worker))
        return _recorder.time_steps(worker=worker, trace=trace, settings=settings, **started)


def time_steps_of_one_bucket(**started: Any) -> int:
    """Time steps whose reduction starts only after the last backward; see `time_steps`."""
    buckets.MOST_BUCKETS = 1  # type: ignore[misc]
    return time_steps(**started)


def time_steps_in_buckets(**started: Any) -> int:
    """Time steps with a bucket for each layer's gradients; see `time_steps`. Small gradients on a slow network show
    what large ones do on a fast one, without this machine's share.
    """
    buckets.BUCKET_BYTES = 1 << 16  # type: ignore[misc]
    return time_steps(**started)


def _cutting(mark: Path) -> Callable[..., None]:
    """Return a replacement of `stripes.send_body` that loses a connection of one body once the mark exists."""
    send_body = stripes.send_body

    def send(body: Sequence[wire.Buffer], flows: Sequence[socket.socket], pace: Callable[[int], None]) -> None:
        if len(flows) > 1 and _taken(mark):
            random.choice(flows).shutdown(socket.SHUT_RDWR)
        send_body(body, flows, pace)

    return send


def _taken(mark: Path) -> bool:
    """Remove the mark; return whether it was there and no other process removed it."""
    try:
        mark.unlink()
    except FileNotFoundError:
        return False
    return True
