"""Calls a callback for the records of the history: each step, evaluation and event once, in order.

The callback's state is saved together with its cursor, so a new root's callback continues from both: its
state counts each call once. A root that is lost may have made calls that were not saved, at most AT_ONCE of them;
these are repeated.
"""

import logging
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Final

import msgspec

from bamboo_core.control.protocol import MOST_TEXT, Message, WorkerFailed, WorkerWarning
from bamboo_core.history.records import EvaluationRecord, EventRecord, Record, StepRecord
from bamboo_trainer.callbacks import Callback, MakeCallback
from bamboo_trainer.loggers.interface import LoggerFacts
from bamboo_trainer.tasks.task_errors import told
from bamboo_trainer.worker.history.cursor import Cursor

logger = logging.getLogger(__name__)

AT_ONCE: Final = 10  # records; then its state is saved
MOST_KEPT: Final = 16  # states of checkpoints
MOST_STATE: Final = 64 * 1024  # bytes of its state
DISRUPTIONS: Final = frozenset(
    {"NoticeReceived", "WorkerLost", "WorkerEnded", "WorkerLeft", "Takeover", "Restoring", "Restored"}
)
_SAVED: Final = re.compile(r"the state of step (\d+) is saved")  # of CheckpointSaved


class Called(Cursor, frozen=True, kw_only=True):
    """A callback's cursor and its state.

    during: the attempt of the cursor. at: its state at checkpoints, by step. off: the attempt in which it failed.
    ended: `on_end` was called.
    """

    state: Any = None
    during: int = 0
    at: dict[int, Any] = msgspec.field(default_factory=dict)
    off: int = 0
    ended: bool = False


class CallbackCalls:
    """The calls of a callback. make, facts: of the callback. tell: sends to the coordinator."""

    kind = Called
    at_once = AT_ONCE

    def __init__(self, name: str, make: MakeCallback, facts: LoggerFacts, tell: Callable[[Message], None]) -> None:
        self.who, self.file, self.reason = f"the callback {name}", f"callback-{name}.json", "CallbackFailed"
        self._make, self._facts, self._tell = make, facts, tell
        self._callback: Callback | None = None
        self._doing = ""

    def write(self, records: Sequence[Record], before: Called) -> Called:
        """Call it for these records."""
        now = before
        for record in records:
            now = self._begun_anew(record, now)
            if not _is_off(now):
                now = self._called(record, now)
            now = now.after([record])
        return now if _is_off(now) else self._kept(now)

    def end(self, before: Called) -> Called:
        """Call `on_end`: training is complete."""
        if before.ended:
            return before
        now = msgspec.structs.replace(before, ended=True)
        if _is_off(now):
            return now
        try:
            self._doing = f"in on_end, after step {now.step},"
            self._ready(now).on_end(now.step)
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, now)
        return self._kept(now)

    def close(self) -> None:
        """Forget the callback: the next one is made with the saved state."""
        self._callback = None

    def _begun_anew(self, record: Record, before: Called) -> Called:
        """Restore the callback's state at the checkpoint from which the job restarted, or the newest before,
        if it did.
        """
        if not isinstance(record, StepRecord | EvaluationRecord) or record.attempt <= before.during:
            return before
        trains = isinstance(record, StepRecord)
        first = record.step if trains else record.step + 1
        before = msgspec.structs.replace(before, ended=before.ended and not trains)
        if not before.during or before.step < first:  # no step that it was called for is repeated
            return msgspec.structs.replace(before, during=record.attempt)
        known = {step: state for step, state in before.at.items() if step < first}
        state = known[max(known)] if known else None
        self._callback = None
        return msgspec.structs.replace(before, during=record.attempt, state=state, at=known)

    def _called(self, record: Record, now: Called) -> Called:
        try:
            self._call(record, now)
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, now)
        if not (isinstance(record, StepRecord) and record.checkpoint):
            return now
        now = self._kept(now)
        at = dict(sorted({**now.at, record.step: now.state}.items())[-MOST_KEPT:])
        return msgspec.structs.replace(now, at=at)

    def _call(self, record: Record, now: Called) -> None:
        match record:
            case StepRecord(step=step):
                self._doing = f"in on_step, of step {step},"
                self._ready(now).on_step(record)
            case EvaluationRecord(step=step):
                self._doing = f"in on_evaluation, of the state after step {step},"
                self._ready(now).on_evaluation(record)
            case EventRecord(reason="CheckpointSaved", message=message) if saved := _SAVED.search(message):
                self._doing = f"in on_checkpoint, of step {saved[1]},"
                self._ready(now).on_checkpoint(int(saved[1]))
            case EventRecord(reason=reason) if reason in DISRUPTIONS:
                self._doing = f"in on_disruption ({reason}), after step {now.step},"
                self._ready(now).on_disruption(record)

    def _ready(self, now: Called) -> Callback:
        if self._callback is None:
            made = self._make(self._facts)
            if not isinstance(made, Callback):
                raise TypeError(f"made {type(made).__name__}, expected a bamboo_trainer.callbacks.Callback")
            if now.state is not None:
                made.load_state_dict(deepcopy(now.state))  # the copy belongs to it from now on
            self._callback = made
        return self._callback

    def _kept(self, now: Called) -> Called:
        """Save the callback's current state."""
        if self._callback is None:
            return now
        self._doing = f"in state_dict, after step {now.step},"
        try:
            data = msgspec.json.encode(self._callback.state_dict())
            if len(data) > MOST_STATE:
                raise ValueError(f"it keeps {len(data)} bytes, at most {MOST_STATE} are accepted")
            return msgspec.structs.replace(now, state=msgspec.json.decode(data))
        except BaseException as error:  # in this thread no signal raises anything
            return self._failed(error, now)

    def _failed(self, error: BaseException, now: Called) -> Called:
        """Report the error, and end the job or this callback."""
        fails_job = getattr(self._callback or self._make, "fails_job", False)
        text = f"{self.who}, {self._doing} raised {told(error)}"
        logger.warning("%s", text, exc_info=error)
        if fails_job:
            self._tell(WorkerFailed(reason="CallbackFailed", message=text[:MOST_TEXT]))
        else:
            text = f"{text[: MOST_TEXT // 2]}; it is not called any more"
            self._tell(WorkerWarning(reason="CallbackFailed", message=text))
        self._callback = None
        return msgspec.structs.replace(now, off=max(1, now.during), during=max(1, now.during))


def _is_off(now: Called) -> bool:
    return now.off > 0 and now.off == now.during
