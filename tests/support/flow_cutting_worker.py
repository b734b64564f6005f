"""A worker whose large frames are many, and that loses single connections of its links at random moments."""

import json
import os
import random
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from bamboo_trainer.transport import links, wire
from bamboo_trainer.worker import process

ENVIRONMENT = "BAMBOO_TEST_CUTS"  # {"marks": folder, "seed": number, "cuts": by each worker}


def cutting(worker: str) -> Callable[..., None]:
    """What stands in the place of `stripes.send_body`: some bodies lose one of their connections, before or after any
    of their parts.
    """
    document = json.loads(os.environ[ENVIRONMENT])
    rng, marks = random.Random(f"{document['seed']} {worker}"), Path(document["marks"])
    bodies = sorted(rng.sample(range(60), document["cuts"]))
    send_body, sent, cut = links.send_body, 0, 0

    def send(body: Sequence[wire.Buffer], flows: Sequence[socket.socket], pace: Callable[[int], None]) -> None:
        nonlocal sent, cut
        at, pieces = -1, 0
        if cut < len(bodies) and sent >= bodies[cut] and len(flows) > 1:
            at = rng.randrange(len(flows))
            (marks / f"{worker}-{cut}-{len(flows)}").touch()
            cut += 1
        sent += 1

        def struck(size: int) -> None:
            nonlocal pieces
            if pieces == at:
                rng.choice(flows).shutdown(socket.SHUT_RDWR)
            pieces += 1
            pace(size)

        send_body(body, flows, struck)

    return send


def main(worker_id: str = "", **arguments: str) -> int:
    name = arguments.pop("worker", worker_id)
    wire.STRIPED_FROM = 2000  # type: ignore[misc]
    links.send_body = cutting(name)
    return process.main(worker=name, **arguments)
