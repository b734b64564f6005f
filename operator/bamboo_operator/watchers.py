"""Whether kopf still watches: a watcher that fails ends with a line in the log, and the rest of the process lives on.

Such an operator would be blind and look well, so it has to say that it is not.
"""

import asyncio

PREFIX = "watcher for "  # of the names of kopf's tasks


class Watchers:
    """Remembers which there were; asked from time to time in the operator's loop."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def lost(self) -> str | None:
        """A sentence on a watcher that was there and is there no more, if there is one."""
        names = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
        now = {name for name in names if name.startswith(PREFIX)}
        self._seen |= now
        watched = {_namespace(name) for name in now}  # NB: of a namespace that is deleted kopf watches nothing more
        self._seen = {name for name in self._seen if name.endswith("@None") or _namespace(name) in watched}
        missing = sorted(self._seen - now)
        return f"the {missing[0]} has ended" if missing else None


def _namespace(name: str) -> str:
    return name.rpartition("@")[2]
