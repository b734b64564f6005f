"""A pod's status as a kubelet writes it, computed from its containers' states and the current time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True, kw_only=True)
class Record:
    """A container's state, as in a ContainerStatus. The container is never restarted."""

    name: str
    image: str
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    container_id: str = ""

    def wait(self, reason: str, message: str) -> None:
        self.state = {"waiting": {"reason": reason, "message": message}}

    def run(self, pid: int) -> None:
        self.container_id = f"process://{pid}"
        self.state = {"running": {"startedAt": now()}}

    def end(self, code: int, reason: str, message: str = "") -> None:
        started = self.state.get("running", {}).get("startedAt", now())
        self.state = {
            "terminated": {
                "exitCode": code,
                "reason": reason,
                "message": message,
                "startedAt": started,
                "finishedAt": now(),
                "containerID": self.container_id,
            }
        }

    @property
    def exit_code(self) -> int | None:
        ended: Json | None = self.state.get("terminated")
        return None if ended is None else int(ended["exitCode"])

    def to_json(self) -> Json:
        running = "running" in self.state
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image,
            "containerID": self.container_id,
            "ready": running,
            "started": running,
            "restartCount": 0,
            "state": _only(self.state),
        }


def _only(state: Json) -> Json:
    """Return the state with null for the other states, since a merge patch leaves unnamed fields alone.

    `$patch: replace` is not used, since API servers differ in its effect here.
    """
    return {**dict.fromkeys(("waiting", "running", "terminated")), **state}


def phase(records: Sequence[Record], init: Sequence[Record], *, over: bool) -> str:
    """Return the pod's phase. over: whether the pod has ended, so that no container runs or will start."""
    codes = [record.exit_code for record in (*init, *records)]
    if over:
        return "Succeeded" if all(code == 0 for code in codes) else "Failed"
    return "Pending" if all("waiting" in record.state for record in records) else "Running"


def status(records: Sequence[Record], init: Sequence[Record], *, over: bool, facts: Json) -> Json:
    """Return a pod's status as a strategic merge patch, which keeps the conditions that other components have set.
    facts: addresses and start time.
    """
    ready = bool(records) and all("running" in record.state for record in records)
    initialized = all(record.exit_code == 0 for record in init)
    truth = {"Initialized": initialized, "ContainersReady": ready, "Ready": ready}
    reason = {"reason": "PodCompleted"} if over else {} if ready else {"reason": "ContainersNotReady"}
    found = {
        **facts,
        "phase": phase(records, init, over=over),
        "conditions": [
            {"type": kind, "status": str(value), **({} if value else reason), "lastTransitionTime": now()}
            for kind, value in truth.items()
        ],
        "containerStatuses": [record.to_json() for record in records],
    }
    if init:
        found["initContainerStatuses"] = [record.to_json() for record in init]
    return found
