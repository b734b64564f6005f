"""Documents of job pages as a browser receives them, job statuses, and a clock."""

from typing import Any

import msgspec

from bamboo_core.page.document import Document, encode
from operator_kit import at, takeover

TAKEOVER = takeover()


class Time:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def received(document: Document) -> Any:
    """Return the document as the browser receives it, decoded from JSON."""
    return msgspec.json.decode(encode(document))


def written(state: str = "Running", **more: Any) -> dict[str, Any]:
    """Return a BambooJob's status as its API object has it."""
    kind = {"Invalid": "Accepted", "Pending": "WorkersReady"}.get(state, state)
    condition = {
        "type": kind,
        "status": "True",
        "reason": "Because",
        "message": f"It is {state}.",
        "lastTransitionTime": at(-9),
    }
    return {"state": state, "conditions": [condition], "startTime": at(-60), **more}
