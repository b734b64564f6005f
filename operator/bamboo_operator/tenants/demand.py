"""What a job wants and has, and what it gets, as tenants' bounds and the order among jobs see it."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from bamboo_operator.tenants.tenant_list import MANY


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job that is to train. Workers that are about to leave are in none of the numbers.

    made: the time of its creation (seconds). fewest: workers of its smallest grid; step: the fewest more with which its
    grid is larger; most: as many as it would have. devices: of a worker; price: of a worker, for an hour.

    pods: that there are; placed: those of them that have a node; wanting: workers that have none yet, with a pod or
    without. begun: has it had a grid? runs: does it have one now? broken: how many workers that grid lacks; harm: what
    is bare in it, so that one more loss would cost state, a clause, "" if it could stand one.

    nodes: which ones its next worker may have; jobs that say the same compete for them. lacks_nodes: the scheduler has
    found none for one of its pods. queued: Kueue says when its pods may have nodes.
    """

    name: str  # NAMESPACE/NAME
    namespace: str
    made: float
    fewest: int
    step: int
    most: int
    devices: int = 1
    price: Decimal = Decimal(0)
    pods: int = 0
    placed: int = 0
    wanting: int = 0
    begun: bool = False
    runs: bool = False
    broken: int = 0
    harm: str = ""
    nodes: str = ""
    lacks_nodes: bool = False
    queued: bool = False


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Why a job has less than it wants."""

    reason: str  # CamelCase
    message: str  # a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a job may have now.

    bound: the most workers that it may hold, by which its coordinator goes. pods: the most pods at this moment; those
    beyond that which have no node are withdrawn, and all of a job that has no grid yet. extra: may it have one more for
    a while, to take another's place? in_line: it waits for nodes that others want, too.
    """

    bound: int
    pods: int
    extra: bool = False
    in_line: bool = False
    held_back: HeldBack | None = None


UNBOUND: Final = Grant(bound=MANY, pods=MANY, extra=True)  # of an operator without tenants
