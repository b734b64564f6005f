"""What one job may have at the moment, as those see it who make and remove its pods."""

from bamboo_operator.tenants.demand import UNBOUND, Grant, HeldBack


class JobShare:
    """A job's share of the nodes, which is decided for all jobs together. decided: it has all that it wants as long as
    nobody says something else; else it neither gets nor loses pods until somebody does.
    """

    def __init__(self, *, decided: bool = True) -> None:
        self.grant: Grant | None = UNBOUND if decided else None

    def room(self, pods: int) -> int:
        """How many pods more it may have beside so many."""
        return 0 if self.grant is None else max(0, self.grant.pods + self.grant.extra - pods)

    def surplus(self, pods: int) -> int:
        """How many of so many pods it may not have."""
        return 0 if self.grant is None else max(0, pods - self.grant.pods - self.grant.extra)

    @property
    def held_back(self) -> HeldBack | None:
        """What keeps it from workers, if anything does."""
        return None if self.grant is None else self.grant.held_back

    def is_bound(self, pods: int) -> bool:
        """With so many pods, does it have all that it may have, whether there are nodes for more or not?"""
        return self.grant is None or (pods >= self.grant.pods and not self.grant.in_line)
