"""When to ask for what should have changed by now: a watch that was interrupted may never tell what it has missed."""

from collections.abc import Collection

FIRST_SECONDS, LAST_SECONDS = 60.0, 960.0


class Doubts:
    """Each is asked for after a minute of waiting, and then less and less often."""

    def __init__(self) -> None:
        self._next: dict[str, tuple[float, float]] = {}  # when, and how long after the time before

    def due(self, waited_for: Collection[str], now: float) -> list[str]:
        """Which of those are to be asked for. Who is not waited for any more is forgotten."""
        new = (now + FIRST_SECONDS, FIRST_SECONDS)
        self._next = {key: self._next.get(key, new) for key in waited_for}
        return [key for key, (at, _) in self._next.items() if at <= now]

    def asked(self, key: str, now: float) -> None:
        """There was an answer."""
        pause = min(2 * self._next[key][1], LAST_SECONDS)
        self._next[key] = (now + pause, pause)
