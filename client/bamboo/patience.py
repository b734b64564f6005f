"""How long a process is waited for that is to start or to answer: its time, longer while it works, and not for ever.

A limit by the clock is right on an idle machine and wrong on a busy one, where a process that is well takes a hundred
times as long. So after its time what it has done meanwhile decides, itself and all that it has started.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Final, Self

QUIET_SECONDS: Final = 60.0  # in which whoever is well has done something, however busy the machine is
TIMES: Final = 10  # as long as its time at most, while it works
MOST_SECONDS: Final = 7200.0
_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Effort:
    """What processes have done so far."""

    cpu: float = 0.0  # seconds of processor time
    pages: int = 0  # that they have touched first, or read


def effort_of(pid: int) -> Effort:
    """The effort of a process and its descendants; nothing if it has ended."""
    parents, done = dict[int, int](), dict[int, Effort]()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # it may be gone by now
                fields = file.read().rpartition(b")")[2].split()
                parents[int(entry)] = int(fields[1])
                done[int(entry)] = Effort(sum(map(int, fields[11:15])) * _TICK, sum(map(int, fields[7:11])))
    family, more = set[int](), {pid} & done.keys()
    while more:
        family |= more
        more = {child for child, parent in parents.items() if parent in more} - family
    return Effort(sum(done[one].cpu for one in family), sum(done[one].pages for one in family))


@dataclass(frozen=True, slots=True)
class WaitSoFar:
    """A wait for a process: for how many seconds it has been waited for, and for how many it has done nothing
    (`quiet`).
    """

    waited: float = 0.0
    quiet: float = 0.0
    effort: Effort = Effort()

    def after(self, seconds: float, effort: Effort) -> Self:
        """The wait so many seconds later, when the process has done that."""
        quiet = self.quiet + seconds if effort == self.effort else 0.0
        return type(self)(self.waited + seconds, quiet, effort)

    def exceeds(self, seconds: float) -> str:
        """Why it is not waited for any longer if that is its time, in words; "" as long as it is."""
        most = max(seconds, min(TIMES * seconds, MOST_SECONDS))
        if self.waited < seconds:
            return ""
        if self.quiet >= QUIET_SECONDS:
            return (
                f"it has done nothing for {self.quiet:.0f} s, and took {self.effort.cpu:.1f} s of processor time before"
            )
        if self.effort.cpu >= seconds or self.waited >= most:
            return f"it has taken {self.effort.cpu:.1f} s of processor time and is not done"
        return ""

    def told(self) -> str:
        """What a person wants to know who waits, too."""
        load = os.getloadavg()[0]
        return f"{self.waited:.0f} s, {self.effort.cpu:.1f} s of them on a processor (the machine's load is {load:.1f})"
