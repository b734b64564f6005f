"""The wait before workers are requested again when their predecessors ended before they had joined.

That is how a worker ends whose image or template is wrong, or whose node refuses it, and its successor would end the
same way.
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

    rounds: int = 0  # consecutive rounds of workers that ended before they joined
    made: int = 0  # workers made so far when the newest round ended
    ended: float = 0.0  # when that was (monotonic seconds)
    detail: str = ""  # how the last one ended

    def after(self, number: int, made: int, now: float, detail: str) -> "StartBackoff":
        """Return the wait after one more worker that ended before it joined.

        Workers that were created together, and end together, are one round.
        """
        if self.rounds and number < self.made:
            return replace(self, detail=detail)
        return StartBackoff(rounds=self.rounds + 1, made=made, ended=now, detail=detail)

    @property
    def pause(self) -> float:
        """Seconds from the end of the newest round to the next; the first round is forgiven."""
        return 0.0 if self.rounds < 2 else min(LAST_SECONDS, FIRST_SECONDS * 2.0 ** min(self.rounds - 2, 30))

    def holds(self, now: float) -> bool:
        """Return whether the operator must not request workers yet."""
        return now < self.ended + self.pause


def failed_start(pod: Mapping[str, Any]) -> str | None:
    """Return how a worker that has not joined failed by itself, or why its node refused it; None if it did not fail, or
    was taken away.
    """
    end, reason = worker_exit(pod), (pod.get("status") or {}).get("reason")
    return None if end is None or is_deleted(pod) or reason in DISRUPTIONS else end[1]
