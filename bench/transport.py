"""How fast large frames go from one process to another on this machine, and what CPU they take: one connection a link,
or several.

    python bench/transport.py                     # 1 to 300 MB
    python bench/transport.py --flows 4 --megabytes 100

The real transport at both ends, each in a process of its own. Frames are sent one after the other, and in one stream of
which the writer always has the next. CPU is that of both processes; idle is what both take in two seconds in which
nothing is sent, while the links stand.
"""

import logging
import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from _common import machine, median, say, show, write_json
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.transport.base import Arrived, Event
from bamboo_trainer.transport.tcp import TcpTransport

SECRET = "bench"
IDLE_SECONDS = 2.0
SECONDS = 120.0  # for a frame
STREAM_MEGABYTES = 1000
MEGABYTE = 1_000_000


class End:
    """One worker's transport. It answers each frame with tensors by one that has none."""

    def __init__(self, name: str, flows: int, answers: bool) -> None:
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # of links that end when the measurement does
        self.heard = threading.Semaphore(0)
        self._answers = answers
        self.transport = TcpTransport(name, SECRET, self._deliver)
        self.transport.trust(SECRET, flows=flows)

    def _deliver(self, event: Event) -> None:
        if not isinstance(event, Arrived):
            raise SystemExit(f"a link broke: {event}")
        if self._answers:
            answer = Frame(address=Address(FrameKind.READY, 0, 0, event.frame.address.step), epoch=1)
            self.transport.send(event.sender, answer)
        self.heard.release()


def receiver(pipe: Connection, flows: int) -> None:
    end = End("b", flows, answers=True)
    pipe.send(end.transport.port)
    end.transport.peers({"a": ("127.0.0.1", pipe.recv())})
    pipe.send("ready")
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())
    end.transport.close(0.0)


class Sender:
    """This side, and the other one's CPU."""

    def __init__(self, pipe: Connection, flows: int) -> None:
        self._pipe, self._end, self._step = pipe, End("a", flows, answers=False), 0
        pipe.send(self._end.transport.port)
        self._end.transport.peers({"b": ("127.0.0.1", pipe.recv())})
        pipe.recv()

    def send(self, body: torch.Tensor, count: int) -> float:
        """Sends so many frames; returns the seconds until the last one was answered."""
        began = time.monotonic()
        for _ in range(count):
            self._step += 1
            address = Address(FrameKind.SYNC, 0, 0, self._step)
            self._end.transport.send("b", Frame(address=address, epoch=1, tensors=(body,)))
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


def measure(pipe: Connection, flows: int, megabytes: Sequence[int], repeat: int) -> None:
    """Measures in a process of its own; sends the list of figures, one for each size, then the idle CPU a second."""
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.Process(target=receiver, args=(theirs, flows))
    other.start()
    sender = Sender(ours, flows)
    found = []
    for size in megabytes:
        body = torch.zeros(size * MEGABYTE // 4)
        sender.send(body, 2)  # connections and buffers are made
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


def run(flows: int, megabytes: Sequence[int], repeat: int) -> tuple[list[dict[str, float]], float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=measure, args=(theirs, flows, megabytes, repeat))
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
    flows: Annotated[list[int] | None, typer.Option(min=1, max=16, help="Of a link; may be repeated.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Single frames of each size.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    multiprocessing.set_start_method("spawn")
    rows, document = [], dict[str, Any]()
    for number in flows or [1, 4]:
        name = f"{number} connection{'s' * (number > 1)}"
        say(name)
        figures, idle = run(number, megabytes or [1, 10, 30, 100, 300], repeat)
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
    show("One way on this machine", ["a link", "MB", "frame, ms", "stream, GB/s", "CPU s per GB", "idle CPU"], rows)
    write_json(json_file, {"machine": machine(), "links": document})


if __name__ == "__main__":
    typer.run(main)
