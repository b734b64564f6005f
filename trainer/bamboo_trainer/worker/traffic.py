"""The bytes that this worker sends in a step, by kind."""

from collections.abc import Sequence

from bamboo_core.control.memory import SentTraffic, Traffic
from bamboo_trainer.frames.frame import FrameKind

KINDS = {
    FrameKind.ACTIVATION: "activation",
    FrameKind.GRADIENT: "gradient",
    FrameKind.SPOT_CHECK: "activation",
    FrameKind.CONTRIBUTION: "reduction",
    FrameKind.RESULT: "reduction",
    FrameKind.PARTIAL_SUM: "reduction",
    FrameKind.KEPT_SUM: "kept",
    FrameKind.TIED: "tied",
    FrameKind.SYNC: "sync",
    FrameKind.LAYER: "state",
}  # everything else is control


def by_kind(numbers: Sequence[int]) -> Traffic:
    """Sum the bytes by kind. numbers: bytes, by the number of the frame's kind."""
    sums = dict.fromkeys(Traffic.__struct_fields__, 0)
    for number in FrameKind:
        sums[KINDS.get(number, "control")] += numbers[number]
    return Traffic(**sums)


class TrafficMeter:
    """Counts the steps over which traffic was sent; `now` is called regularly with the current step."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._steps = 0

    def now(self, step: int, sent: Sequence[int]) -> SentTraffic | None:
        """Return the bytes sent so far, and the number of steps; None before the first one is over. Steps repeated
        after the job went back to a checkpoint count again, as their bytes do.
        """
        if self._step is not None and step > self._step:
            self._steps += step - self._step
        self._step = step
        return SentTraffic(sent=by_kind(sent), steps=self._steps) if self._steps else None
