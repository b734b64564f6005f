"""The place where a process crashed: faulthandler's dump, cut to the frames that the user can act on."""

import faulthandler
import os
import re
from dataclasses import dataclass
from typing import Final

MOST_BYTES: Final = 1 << 20
MOST_FRAMES: Final = 30
_FATAL: Final = re.compile(r"Fatal Python error: (.*)")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A crash. error: such as "Segmentation fault". place: file, line and function of the user's innermost frame, or
    "". frames: from the innermost to the user's outermost one; all if none is the user's. left_out: how many follow.
    """

    error: str
    place: str
    frames: tuple[str, ...]
    left_out: int

    def lines(self, who: str) -> str:
        """Return lines for the log. who: the process, in words."""
        more = [f"  and {self.left_out} frames further out, of libraries and Bamboo"] if self.left_out else []
        return "\n".join([f"{who} crashed: {self.error} (most recent call first)", *self.frames, *more, ""])


class CrashFile:
    """An unnamed file that records where a child process, not forked yet, crashes."""

    def __init__(self) -> None:
        self._file = os.memfd_create("crash")

    def enable(self) -> None:
        """Record crashes from now on. Called in the child."""
        faulthandler.enable(self._file, all_threads=False)

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> Crash | None:
        """Read the crash, in the parent, once the child has ended; None if it did not crash."""
        return read_crash(os.pread(self._file, MOST_BYTES, 0).decode(errors="replace"))


def read_crash(dump: str) -> Crash | None:
    """Parse faulthandler's dump of the thread that crashed."""
    fatal = _FATAL.search(dump)
    if fatal is None:
        return None
    from bamboo_trainer.tasks.task_errors import is_users, shown  # torch, which a launcher may not have imported

    lines = dump[fatal.end() :].splitlines()
    frames = [(line, frame) for line in lines if (frame := _FRAME.fullmatch(line))]
    users = [number for number, (_, frame) in enumerate(frames) if is_users(frame[1])]
    kept = frames[: min(users[-1] + 1 if users else len(frames), MOST_FRAMES)]
    place = ""
    if users:
        file, line, function = frames[users[0]][1].groups()
        place = f"{shown(file)} line {line}, in {function}"
    return Crash(error=fatal[1], place=place, frames=tuple(line for line, _ in kept), left_out=len(frames) - len(kept))
