"""A worker that asks before each forward and backward of chosen steps, so that it can be ended at a chosen place.

`bamboo run --preempt at:STEP` strikes in the middle of a step, however fast the machine is: before an instruction the
worker asks the launcher and waits, and the local runner lets it proceed or ends it right there.
"""

import logging
import socket
from collections.abc import Collection

from bamboo_core.planning.plan import Cell
from bamboo_trainer.telemetry.spans import Follower

logger = logging.getLogger(__name__)

GATED = ("Forward", "Backward", "BackwardInput")  # two for each microbatch, with any schedule
ANSWER_SECONDS = 60.0


class StrikeGate(Follower):
    """A follower of spans that asks before an instruction begins. Without an answer the worker proceeds.

    channel: to the launcher; a line out, a line back.
    """

    def __init__(self, channel: socket.socket, steps: Collection[int]) -> None:
        self._channel, self._steps = channel, frozenset(steps)
        channel.settimeout(ANSWER_SECONDS)

    def begins(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        if step in self._steps and name in GATED:
            self._ask(step)

    def close(self) -> None:
        self._channel.close()

    def _ask(self, step: int) -> None:
        try:
            self._channel.sendall(b"%d\n" % step)
            answered = bool(self._channel.recv(1))
        except OSError as error:
            logger.warning("nobody answered before step %d went on: %s", step + 1, error)
            answered = False
        if not answered:  # a late answer must not be taken for the next question's
            self._steps = frozenset()
