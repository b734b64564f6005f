"""The owner's record of one replica of its cell, and what it must send to it: pure decisions."""

from dataclasses import dataclass
from enum import Enum, auto

CLOSE_STEPS = 2  # the owner waits for a replica that lags by no more, once, to bring it level
PATIENCE_STEPS = 16  # it also waits for one that has had a state for that long and comes no closer


class Owed(Enum):
    NOTHING = auto()
    STATE = auto()  # the whole state
    GRADIENTS = auto()  # the final gradients of the step in progress and of later ones


@dataclass(slots=True)
class ReplicaProgress:
    """The owner's record of one replica.

    since: the replica gets all final gradients from this step on; None: none. acked: the version that it holds. epoch:
    of the plan that made it a replica; what it sends under an earlier one is of a state that it may have dropped.
    secured: the version that it can reach with its gradients, without help. level: it has been in step together with
    the replicas of the stage's other parts, if workers have several devices.
    """

    epoch: int = 0
    since: int | None = None
    acked: int = -1
    secured: int = -1
    synced: bool = False
    level: bool = False
    follows_from: int | None = None  # the owner's version when the replica first had all it needs to continue alone

    def announced(self, version: int, secured: int, mine: int, same: bool) -> Owed:
        """Take in an announcement, and return what to send. version: held by the replica; -1: none. secured: the
        version that it can reach. mine: the owner's version. same: the digests are equal.
        """
        self.secured = secured
        owed = self._owed(version, mine, same)
        reached = max(self.acked, self.secured)
        if self.follows_from is None and self.since is not None and reached >= self.since:
            self.follows_from = mine
        return owed

    def _owed(self, version: int, mine: int, same: bool) -> Owed:
        if version < 0 <= self.acked:  # it was no replica in a plan that this owner has never obeyed
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
        """Return what to send again, because a broken link or a skipped step may have lost what was sent."""
        if self.since is None:
            return Owed.NOTHING
        if self.acked >= mine:
            return Owed.GRADIENTS
        self.since, self.follows_from = mine, None
        return Owed.STATE

    def caught_up(self, mine: int) -> bool:
        """Return True once, when the replica first holds all that the owner holds."""
        if self.synced or self.since is None or self.acked < mine:
            return False
        self.synced = True
        return True

    def holds_back(self, step: int, strict: bool) -> bool:
        """Return whether the owner must wait for the replica before `step` is committed. See docs/design/commit.md.

        It does not wait for a replica that is being filled, but for one that only has to come level: where a step is
        shorter than the way to the replica and back, the replica would never come level by itself. strict: the replica
        must be able to complete the step without any worker's log.
        """
        if self.synced:
            return self.acked < step or (strict and self.secured <= step)
        if self.follows_from is None or self.acked >= step:
            return False
        return step - self.acked <= CLOSE_STEPS or step - self.follows_from >= PATIENCE_STEPS
