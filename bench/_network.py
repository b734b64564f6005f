"""Machines on this one: network namespaces whose only way to each other is through `_switch`, which shapes it.

A namespace belongs to a process and goes with it, so that nothing remains whatever happens. Needs Linux, and root or
the right to make namespaces.
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

PATH = "BAMBOO_BENCH_NETWORK"  # of the switch's socket
CUT = "cut"  # a file beside a worker's trace; once it is there, a worker loses a connection and removes it
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2)
TUN, NO_INFORMATION, SET_INTERFACE = 0x0001, 0x1000, 0x400454CA  # of linux/if_tun.h
START_SECONDS = 60.0
STREAM_SECONDS = 120.0


def enter(address: str) -> socket.socket:
    """Move this thread, and those that it starts, to a namespace with this address; it stays until that is closed.

    RuntimeError if this machine does not let us.
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
        """Shapes the network from now on; returns what the switch has carried, dropped and taken until now."""
        self._channel.send(json.dumps({"shape": asdict(shape)}).encode())
        found: dict[str, float] = json.loads(self._channel.recv(4096))
        return found


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Moves this process's main thread into it, at the CONTROL address."""
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
    """A worker on a machine of its own. started: the launcher's other arguments of a worker."""
    stripes.send_body = _cutting(Path(trace).with_name(CUT))
    with enter(address_of(worker)):
        settings = WorkerSettings(host=address_of(worker))
        return _recorder.time_steps(worker=worker, trace=trace, settings=settings, **started)


def time_steps_of_one_bucket(**started: Any) -> int:
    """Times steps with no part of the reduction before the last backward is done; see `time_steps`."""
    buckets.MOST_BUCKETS = 1  # type: ignore[misc]
    return time_steps(**started)


def time_steps_in_buckets(**started: Any) -> int:
    """Times steps with each layer's gradients in a bucket: small ones on a slow network show what large ones do on a
    fast one, without this machine's share in it. See `time_steps`.
    """
    buckets.BUCKET_BYTES = 1 << 16  # type: ignore[misc]
    return time_steps(**started)


def _cutting(mark: Path) -> Callable[..., None]:
    """What stands in the place of `stripes.send_body`: once the mark is there, one body loses one of its connections;
    the mark goes.
    """
    send_body = stripes.send_body

    def send(
        number: int, body: Sequence[wire.Buffer], flows: Sequence[socket.socket], pace: Callable[[int], None]
    ) -> None:
        if len(flows) > 1 and _taken(mark):
            random.choice(flows).shutdown(socket.SHUT_RDWR)
        send_body(number, body, flows, pace)

    return send


def _taken(mark: Path) -> bool:
    """Was it there, and are we the only ones who took it?"""
    try:
        mark.unlink()
    except FileNotFoundError:
        return False
    return True
