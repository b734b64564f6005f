"""How long to wait before workers are requested again, when those before them ended before they had joined.

So ends a worker whose image or template is wrong, or whose node refuses it, and the next one would end the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bamboo_operator.signals.cloud_marks import DISRUPTIONS
from bamboo_operator.signals.signals import is_deleted, worker_exit

FIRST_SECONDS, LAST_SECONDS = 10.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBackoff:
    """The wait after workers that ended before they joined."""

    rounds: int = 0  # of workers that ended so, one after the other
    made: int = 0  # workers made so far when the newest round ended
    ended: float = 0.0  # when that was (monotonic seconds)
    detail: str = ""  # how the last one ended

    def after(self, number: int, made: int, now: float, detail: str) -> "StartBackoff":
        """The wait after one more worker that ended so. Workers that were made together, and end together, are one
        round.
        """
        if self.rounds and number < self.made:
            return replace(self, detail=detail)
        return StartBackoff(rounds=self.rounds + 1, made=made, ended=now, detail=detail)

    @property
    def pause(self) -> float:
        """Seconds from the end of the newest round to the next; the first round is forgiven."""
        return 0.0 if self.rounds < 2 else min(LAST_SECONDS, FIRST_SECONDS * 2.0 ** min(self.rounds - 2, 30))

    def holds(self, now: float) -> bool:
        """Whether no worker is to be requested yet."""
        return now < self.ended + self.pause


def failed_start(pod: Mapping[str, Any]) -> str | None:
    """How a worker that has not joined has ended by itself, or was refused by its node; None if it did not, or was
    taken away.
    """
    end, reason = worker_exit(pod), (pod.get("status") or {}).get("reason")
    return None if end is None or is_deleted(pod) or reason in DISRUPTIONS else end[1]
