"""How fast large frames go from one process to another on this machine, and what CPU they take: TCP beside NIXL.

    python bench/transport.py                     # 1 to 300 MB; NIXL over UCX's TCP, and over what UCX chooses
    python bench/transport.py --only "TCP, 4 flows" --megabytes 100
    python bench/transport.py --only "NIXL, GPUs by the host" --only "NIXL, GPUs directly"     # with GPUs

The real transport at both ends, each in a process of its own. Frames are sent one after the other, and in one stream of
which the writer always has the next. CPU is that of both processes; idle is what both take in two seconds in which
nothing is sent, while the links stand. Ways between GPUs are from the memory of one to that of another, if there are
two, and what the log keeps is left out of them.
"""

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from _common import chosen_of, machine, median, say, show, write_json
from bamboo_core.job.placement_spec import TransportType
from bamboo_core.job.spec import TopologySpec
from bamboo_core.names import LARGE_BODY
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.memory.host_copies import host_copies
from bamboo_trainer.transport.base import Arrived, Event
from bamboo_trainer.transport.choice import body_channel
from bamboo_trainer.transport.tcp import TcpTransport

SECRET = "bench"
IDLE_SECONDS = 2.0
SECONDS = 120.0  # for a frame
STREAM_MEGABYTES = 1000
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Way:
    """A way for large tensors to travel."""

    transport: TransportType
    flows: int = 1
    tls: str = ""  # UCX's transports, as in UCX_TLS
    gpus: bool = False
    direct: bool = False  # GPUDirect, where there is any


WAYS = {
    "TCP, 1 flow": Way(TransportType.TCP),
    "TCP, 4 flows": Way(TransportType.TCP, flows=4),
    "NIXL over TCP": Way(TransportType.NIXL, tls="tcp"),
    "NIXL": Way(TransportType.NIXL, tls="all"),
    "NIXL, GPUs by the host": Way(TransportType.NIXL, gpus=True),
    "NIXL, GPUs directly": Way(TransportType.NIXL, gpus=True, direct=True),
}


class End:
    """One worker's transport. It answers each frame with tensors by one that has none."""

    def __init__(self, name: str, way: Way, device: torch.device, answers: bool) -> None:
        if way.tls:
            os.environ["UCX_TLS"] = way.tls
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # of links that end when the measurement does
        self.heard = threading.Semaphore(0)
        self._answers = answers
        self.transport = TcpTransport(name, SECRET, self._deliver)
        self._copies = host_copies(device, lambda: None)
        topology = TopologySpec(stages=2, transport=way.transport, flows_per_link=way.flows, gpu_direct=way.direct)
        self.transport.trust(SECRET, None, body_channel(topology, name, device), self._copies.buffer)
        self._device, self._lock = device, threading.Lock()
        if way.direct and not self.transport.reads_devices(FrameKind.ACTIVATION, LARGE_BODY):
            raise SystemExit("there is no GPUDirect here; a worker's log says why")

    def _deliver(self, event: Event) -> None:
        if not isinstance(event, Arrived):
            raise SystemExit(f"a link broke: {event}")
        self._bring(event.frame)
        if self._answers:
            answer = Frame(address=Address(FrameKind.READY, 0, 0, event.frame.address.step), epoch=1)
            self.transport.send(event.sender, answer)
        self.heard.release()

    def _bring(self, frame: Frame) -> None:
        """To the device, and until it is there; lanes have threads of their own."""
        with self._lock:
            if frame.made is not None:
                self._copies.arrived(frame.tensors, frame.made)
            self._copies.bring(frame.tensors)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def send(self, address: Address, body: torch.Tensor) -> None:
        tensors: tuple[torch.Tensor, ...] = (body,)
        made: torch.cuda.Event | None = None
        if self.transport.reads_devices(address.kind, body.nbytes):
            tensors, made = self._copies.leave(tensors)
        else:
            tensors = self._copies.start(tensors).wait()
        self.transport.send("b", Frame(address=address, epoch=1, tensors=tensors, made=made))


def device_of(way: Way, number: int) -> torch.device:
    return torch.device("cuda", number % torch.cuda.device_count()) if way.gpus else torch.device("cpu")


def receiver(pipe: Connection, way: Way) -> None:
    end = End("b", way, device_of(way, 1), answers=True)
    pipe.send(end.transport.port)
    end.transport.peers({"a": ("127.0.0.1", pipe.recv())})
    pipe.send("ready")
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())
    end.transport.close(0.0)


class Sender:
    """This side, and the other one's CPU."""

    def __init__(self, pipe: Connection, way: Way) -> None:
        self.device = device_of(way, 0)
        self._pipe, self._end, self._step = pipe, End("a", way, self.device, answers=False), 0
        self._kind = FrameKind.ACTIVATION if way.gpus else FrameKind.SYNC
        pipe.send(self._end.transport.port)
        self._end.transport.peers({"b": ("127.0.0.1", pipe.recv())})
        pipe.recv()

    def send(self, body: torch.Tensor, count: int) -> float:
        """Sends so many frames; returns the seconds until the last one was answered."""
        began = time.monotonic()
        for _ in range(count):
            self._step += 1
            self._end.send(Address(self._kind, 0, 0, self._step), body)
        for _ in range(count):
            if not self._end.heard.acquire(timeout=SECONDS):
                raise SystemExit(f"no answer for {SECONDS} s")
        return time.monotonic() - began

    def cpu(self) -> float:
        """The seconds of both processes so far."""
        self._pipe.send("cpu")
        other: float = self._pipe.recv()
        return other + time.process_time()

    def close(self) -> None:
        self._pipe.send("end")
        self._end.transport.close(0.0)


def measure(pipe: Connection, way: Way, megabytes: Sequence[int], repeat: int) -> None:
    """Measures in a process of its own; sends the list of figures, one for each size, then the idle CPU a second."""
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.Process(target=receiver, args=(theirs, way))
    other.start()
    sender = Sender(ours, way)
    found = []
    for size in megabytes:
        body = torch.zeros(size * MEGABYTE // 4, device=sender.device)
        sender.send(body, 2)  # connections, agents and buffers are made
        single = median([sender.send(body, 1) for _ in range(repeat)])
        count = max(2, STREAM_MEGABYTES // size)
        before = sender.cpu()
        stream = sender.send(body, count)
        cpu, sent = sender.cpu() - before, count * size / 1000
        found.append(
            {"megabytes": size, "frame_ms": 1e3 * single, "stream_gb_s": sent / stream, "cpu_s_per_gb": cpu / sent}
        )
    before = sender.cpu()
    time.sleep(IDLE_SECONDS)
    pipe.send((found, (sender.cpu() - before) / IDLE_SECONDS))
    sender.close()
    other.join()


def run(way: Way, megabytes: Sequence[int], repeat: int) -> tuple[list[dict[str, float]], float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=measure, args=(theirs, way, megabytes, repeat))
    process.start()
    theirs.close()
    try:
        result: tuple[list[dict[str, float]], float] = ours.recv()
    except EOFError:
        raise SystemExit("the sender ended early") from None
    finally:
        process.join()
    return result


def main(
    megabytes: Annotated[list[int] | None, typer.Option(help="Of a frame (10^6 bytes); may be repeated.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(map(repr, WAYS))}; may be repeated.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Single frames of each size.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    multiprocessing.set_start_method("spawn")
    if not torch.cuda.is_available() and any(WAYS[name].gpus for name in only or () if name in WAYS):
        raise SystemExit("--only: there is no GPU here")
    here = [name for name, way in WAYS.items() if torch.cuda.is_available() or not way.gpus]
    rows, document = [], dict[str, Any]()
    for name in chosen_of(only, here):
        say(name)
        figures, idle = run(WAYS[name], megabytes or [1, 10, 30, 100, 300], repeat)
        document[name] = {"sizes": figures, "idle_cpu": idle}
        rows += [
            [
                name,
                f"{f['megabytes']}",
                f"{f['frame_ms']:.1f}",
                f"{f['stream_gb_s']:.2f}",
                f"{f['cpu_s_per_gb']:.2f}",
                f"{100 * idle:.2f} %",
            ]
            for f in figures
        ]
    show("One way on this machine", ["way", "MB", "frame, ms", "stream, GB/s", "CPU s per GB", "idle CPU"], rows)
    write_json(json_file, {"machine": machine(), "ways": document})


if __name__ == "__main__":
    typer.run(main)
