"""What an owner knows of one replica of its cell, and what it owes it: pure decisions."""

from dataclasses import dataclass
from enum import Enum, auto

CLOSE_STEPS = 2  # a replica that lags by no more is waited for, once, so that it is in step
PATIENCE_STEPS = 16  # so is one that has had a state for that long and comes no closer


class Owed(Enum):
    NOTHING = auto()
    STATE = auto()  # the whole state
    GRADIENTS = auto()  # those of the step in progress and of later ones that are final already


@dataclass(slots=True)
class ReplicaProgress:
    """since: the replica gets every gradient from that step on (None: not fed); acked: the version it holds.

    epoch: of the plan in which it became one. What it says of an earlier one is of a state that it may have dropped.
    secured: the version that it can reach without anybody's help, with the gradients that it has. level: it has been in
    step together with the replicas of the stage's other parts, if workers have several devices.
    """

    epoch: int = 0
    since: int | None = None
    acked: int = -1
    secured: int = -1
    synced: bool = False
    level: bool = False
    follows_from: int | None = None  # the owner's version when the replica first had all it needs to go on by itself

    def announced(self, version: int, secured: int, mine: int, same: bool) -> Owed:
        """The replica says that it holds `version` (-1: nothing), and which one it can reach; `mine` is the owner's.

        same: equal digests.
        """
        self.secured = secured
        owed = self._owed(version, mine, same)
        reached = max(self.acked, self.secured)
        if self.follows_from is None and self.since is not None and reached >= self.since:
            self.follows_from = mine
        return owed

    def _owed(self, version: int, mine: int, same: bool) -> Owed:
        if version < 0 <= self.acked:  # it was none for a plan that this owner has never obeyed
            self.since, self.acked, self.follows_from, self.synced, self.level = None, -1, None, False, False
        self.acked = max(self.acked, version)
        if version >= 0 and not same:
            self.since, self.acked, self.follows_from = mine, -1, None
            return Owed.STATE
        if self.since is not None and max(version, self.secured) >= self.since:
            return Owed.NOTHING
        if self.since is not None and version < 0:
            return Owed.NOTHING  # its state is on the way
        self.since, self.follows_from = max(version, mine), None
        if version < mine and self.secured < mine:
            return Owed.STATE
        return Owed.GRADIENTS

    def relinked(self, mine: int) -> Owed:
        """What was sent since the replica's last word may be lost: its link was cut, or the owner skipped a step."""
        if self.since is None:
            return Owed.NOTHING
        if self.acked >= mine:
            return Owed.GRADIENTS
        self.since, self.follows_from = mine, None
        return Owed.STATE

    def caught_up(self, mine: int) -> bool:
        """True once, when the replica first holds all that the owner holds."""
        if self.synced or self.since is None or self.acked < mine:
            return False
        self.synced = True
        return True

    def holds_back(self, step: int, strict: bool) -> bool:
        """Must the owner wait before it lets step `step` be committed? See docs/design/commit.md.

        Not for a replica that is being filled; but for one that only has to come level: where a step takes less than
        the way to the replica and back, it would not do so by itself.

        strict: the replica must not depend on anybody's log to complete the step.
        """
        if self.synced:
            return self.acked < step or (strict and self.secured <= step)
        if self.follows_from is None or self.acked >= step:
            return False
        return step - self.acked <= CLOSE_STEPS or step - self.follows_from >= PATIENCE_STEPS
