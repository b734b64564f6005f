"""Waits for a process that starts or answers: its time, longer while it works, but not forever.

A limit by the clock is wrong on a busy machine, where a healthy process may take a hundred times as long. So after its
time the work done meanwhile decides, of the process and its descendants.
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
    """The work that processes have done so far."""

    cpu: float = 0.0  # seconds of processor time
    pages: int = 0  # that they have touched first, or read


def effort_of(pid: int) -> Effort:
    """Return the effort of a process and its descendants; nothing if it has ended."""
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
    """A wait for a process: its seconds, and those in which the process has done nothing (`quiet`)."""

    waited: float = 0.0
    quiet: float = 0.0
    effort: Effort = Effort()

    def after(self, seconds: float, effort: Effort) -> Self:
        """Return the wait so many seconds later, with the process's effort then."""
        quiet = self.quiet + seconds if effort == self.effort else 0.0
        return type(self)(self.waited + seconds, quiet, effort)

    def exceeds(self, seconds: float) -> str:
        """Return why the wait for a process with that time is over, in words; "" while it is not."""
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
        """Describe the wait for a person."""
        load = os.getloadavg()[0]
        return f"{self.waited:.0f} s, {self.effort.cpu:.1f} s of them on a processor (the machine's load is {load:.1f})"
