"""A network in a process of its own: carries packets between machines' TUN devices, with a given delay and rate.

    python bench/_switch.py SOCKET

Machines join through the Unix socket, each with its device's descriptor. A packet leaves when its machine and its flow
(addresses and ports) have sent earlier ones, at the rates given, and arrives a delay later, when the receiver has taken
earlier ones. Packets that would wait longer than a queue takes are dropped, as switches do. Packets to and from the
CONTROL address are not delayed. Ends when its standard input is closed.
"""

import heapq
import json
import os
import resource
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

CONTROL = "10.77.0.254"
MTU = 65520  # so that Python has few packets to carry
QUEUE_SECONDS = 0.05
AT_ONCE = 16  # packets from one device between two looks at the others


@dataclass(slots=True)
class Shape:
    """The shape of a network."""

    # rate, flow: bits per second of a machine each way, and of one connection; 0: no limit
    rate: float = 0.0
    flow: float = 0.0
    delay: float = 0.0  # seconds one way


@dataclass(slots=True)
class Machine:
    device: int
    channel: socket.socket
    sends: float = 0.0  # until when
    receives: float = 0.0


@dataclass(slots=True)
class Switch:
    machines: dict[bytes, Machine] = field(default_factory=dict)  # by address
    shape: Shape = field(default_factory=Shape)
    flows: dict[bytes, float] = field(default_factory=dict)  # until when each one sends
    waiting: list[tuple[float, int, bytes, bytes]] = field(default_factory=list)
    count: int = 0
    carried: int = 0
    dropped: int = 0

    def take(self, packet: bytes, now: float) -> None:
        """Take in a packet from a device, and schedule its arrival or drop it."""
        source, target = packet[12:16], packet[16:20]
        sender, receiver = self.machines.get(source), self.machines.get(target)
        if packet[0] >> 4 != 4 or sender is None or receiver is None:
            return
        self.count += 1
        control = socket.inet_aton(CONTROL)
        arrives = now
        if control not in (source, target):
            bits, shape, flow = 8 * len(packet), self.shape, packet[12:24]
            gone = now
            if shape.rate:
                gone = max(now, sender.sends) + bits / shape.rate
            leaves = gone
            if shape.flow:
                leaves = max(gone, self.flows.get(flow, 0.0) + bits / shape.flow)
            if leaves - now > QUEUE_SECONDS + bits / (shape.flow or shape.rate or 1e12):
                self.dropped += 1
                return
            sender.sends, self.flows[flow] = gone, leaves
            arrives = leaves + shape.delay
            if shape.rate:
                receiver.receives = max(arrives, receiver.receives + bits / shape.rate)
                arrives = receiver.receives
            self.carried += len(packet)
        heapq.heappush(self.waiting, (arrives, self.count, target, packet))

    def give(self, now: float) -> float:
        """Deliver packets that have arrived; return the seconds until the next one."""
        while self.waiting and self.waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(self.waiting)
            machine = self.machines.get(target)
            if machine is not None:
                try:
                    os.write(machine.device, packet)
                except OSError:  # the machine has gone, or has no room
                    self.dropped += 1
        return max(0.0, self.waiting[0][0] - now) if self.waiting else 1.0

    def obey(self, channel: socket.socket) -> bool:
        """Process a message of a machine or of the benchmark; return False at its end."""
        raw, fds, _, _ = socket.recv_fds(channel, 4096, 1)
        if not raw:
            return False
        message: dict[str, Any] = json.loads(raw)
        answer: dict[str, Any] = {}
        if "join" in message:
            os.set_blocking(fds[0], False)
            self.machines[socket.inet_aton(message["join"])] = Machine(fds[0], channel)
        elif "shape" in message:
            self.shape = Shape(**message["shape"])
            self.flows.clear()
            usage = resource.getrusage(resource.RUSAGE_SELF)
            answer = {
                "carried": self.carried,
                "dropped": self.dropped,
                "cpu": usage.ru_utime + usage.ru_stime,
            }
        channel.send(json.dumps(answer).encode())
        return True

    def leave(self, channel: socket.socket) -> None:
        for address in [address for address, machine in self.machines.items() if machine.channel is channel]:
            os.close(self.machines.pop(address).device)
        channel.close()


def serve(path: str) -> None:
    switch, channels = Switch(), list[socket.socket]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            devices = {machine.device: machine for machine in switch.machines.values()}
            timeout = switch.give(time.monotonic())
            by_number = {channel.fileno(): channel for channel in channels}
            ready, _, _ = select.select([0, listener.fileno(), *by_number, *devices], [], [], timeout)
            for one in ready:
                if one == 0:
                    return
                if one == listener.fileno():
                    channels.append(listener.accept()[0])
                elif one in by_number:
                    if not switch.obey(by_number[one]):
                        channels.remove(by_number[one])
                        switch.leave(by_number[one])
                elif devices[one] in switch.machines.values():
                    _read(switch, one)


def _read(switch: Switch, device: int) -> None:
    for _ in range(AT_ONCE):
        try:
            packet = os.read(device, MTU + 64)
        except OSError:  # nothing more, or its machine is gone
            return
        switch.take(packet, time.monotonic())


if __name__ == "__main__":
    serve(sys.argv[1])
