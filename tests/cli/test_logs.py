"""`bamboo logs --follow`: a worker's log, followed to its end."""

from pathlib import Path
from typing import Any

from remote_command_kit import Fake, type_in
from remote_kit import Asked, Json, ended, job, pod


def test_a_log_that_breaks_off_is_taken_up_until_the_worker_has_ended(tmp_path: Path) -> None:
    """Each stream breaks off after two lines, as with a proxy's timeout; after three streams the worker ends."""
    streams: list[Json] = []

    def answered(asked: Asked) -> tuple[int, Any]:
        if asked.path.endswith("/log"):
            streams.append(asked.query)
        if asked.path.endswith("/pods"):
            return 200, {"items": [pod(1, **(ended(0) if len(streams) >= 3 else {}))]}
        return Fake(job())(asked)

    code, printed, complained, _ = type_in(tmp_path, answered, "logs", "story", "w1", "-f")  # type: ignore[arg-type]
    assert (code, complained, printed) == (0, "", "first\nlast\n" * 3)
    assert [("sinceTime" in query, query["follow"]) for query in streams] == [(n > 0, "true") for n in range(3)]
