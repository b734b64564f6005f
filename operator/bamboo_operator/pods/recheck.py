"""When to read again what should have changed by now: an interrupted watch may never report what it has missed."""

from collections.abc import Collection

FIRST_SECONDS, LAST_SECONDS = 60.0, 960.0


class RecheckSchedule:
    """Each object is read again after a minute of waiting, and then less and less often."""

    def __init__(self) -> None:
        self._next: dict[str, tuple[float, float]] = {}  # when, and how long after the last time

    def due(self, waited_for: Collection[str], now: float) -> list[str]:
        """Which of those are to be read now. What is not waited for any more is forgotten."""
        new = (now + FIRST_SECONDS, FIRST_SECONDS)
        self._next = {key: self._next.get(key, new) for key in waited_for}
        return [key for key, (at, _) in self._next.items() if at <= now]

    def answered(self, key: str, now: float) -> None:
        """It was read, and has not changed."""
        pause = min(2 * self._next[key][1], LAST_SECONDS)
        self._next[key] = (now + pause, pause)
