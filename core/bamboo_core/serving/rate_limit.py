"""Rate limits."""


class TokenBucket:
    """Allows `rate` per second on average and bursts of `burst`. Times are seconds of any monotonic clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst, self._left, self._at = rate, burst, burst, now

    def take(self, now: float) -> bool:
        """Take a token if one is left; return whether it was."""
        self._refill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def wait(self, now: float) -> float:
        """Take a token in any case; return the seconds to wait before the next one."""
        self._refill(now)
        self._left -= 1
        return max(0.0, -self._left / self._rate)

    def _refill(self, now: float) -> None:
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
