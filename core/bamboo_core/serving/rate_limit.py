"""How fast somebody may go."""


class TokenBucket:
    """`rate` a second on average, `burst` at once. Times are seconds of any clock that does not go back."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst, self._left, self._at = rate, burst, burst, now

    def take(self, now: float) -> bool:
        """One, if it is allowed now; one that is not does not count."""
        self._refill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def wait(self, now: float) -> float:
        """Counts one in any case; seconds to wait before the next one."""
        self._refill(now)
        self._left -= 1
        return max(0.0, -self._left / self._rate)

    def _refill(self, now: float) -> None:
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
