"""The place where the task's code is now, in the engine's thread or a helper, as another thread sees it."""

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from bamboo_trainer.tasks.task_errors import is_users, shown
from bamboo_trainer.tasks.user_code import named_layer, run_layer


def place_of(thread: int) -> str:
    """Return the layer in progress, and file, line and function of the innermost frame of user code; "" if none.

    If the thread waits for another one, such as for a batch of data, that thread's frame counts. thread: its
    identifier.
    """
    stacks = sys._current_frames()
    own = stacks.pop(thread, None)
    layer = _layer(own)
    others = (stacks[t.ident] for t in threading.enumerate() if t.ident in stacks and t.ident != threading.get_ident())
    frame = next((user_frame for user_frame in map(_users, (own, *others)) if user_frame is not None), None)
    at = f"{shown(frame.f_code.co_filename)} line {frame.f_lineno}, in {frame.f_code.co_name}" if frame else ""
    return ", ".join(filter(None, (layer, at)))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _users(innermost: FrameType | None) -> FrameType | None:
    return next((frame for frame in _outwards(innermost) if is_users(frame.f_code.co_filename)), None)


def _layer(innermost: FrameType | None) -> str:
    frame = next((one for one in _outwards(innermost) if one.f_code is run_layer.__code__), None)
    return named_layer(frame.f_locals["task_layer"], frame.f_locals["layer"]) if frame else ""
