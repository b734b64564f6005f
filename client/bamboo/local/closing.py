"""Cleanup after the end of a local job. A failure of the cleanup is a warning, and does not fail the job."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from bamboo_core.complaints import complain, complaint_of

T = TypeVar("T")
STEP_SECONDS: Final = 30.0  # for each piece of work; normally it takes a fraction of a second


class Closing:
    """Runner of a cleanup's steps: keeps a failed step's error as a warning, so that later steps still run.

    CancelledError is not caught. `wait` and `do` take `doing`, words for the warning: "while the workers were ended".
    """

    def __init__(self) -> None:
        self._warnings: list[str] = []

    async def wait(self, doing: str, work: Coroutine[Any, Any, T], seconds: float = STEP_SECONDS) -> T | None:
        """Run a coroutine and return its result. If it fails or exceeds `seconds`, keep a warning and return None."""
        try:
            async with asyncio.timeout(seconds) as limit:
                return await work
        except Exception as error:
            self._warnings.append(
                f"{doing}: no end within {seconds:g} s" if limit.expired() else complaint_of(error, doing)
            )
        return None

    def do(self, doing: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._warnings.append(complaint_of(error, doing))

    def tell(self) -> None:
        """Print the warnings of failed steps on standard error, and forget them."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            complain(f"{warning}; how the job ended does not depend on it")
