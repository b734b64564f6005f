"""A Workload of Kueue as the API server has it, reduced to what the operator goes by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bamboo_operator.manifests.workload import INSTEAD_OF, POOLS, REPLACES, SHAPE, STANDBY, spread_seats
from bamboo_operator.queues.topology import Domain, read_domains

Json = Mapping[str, Any]

PREEMPTED: Final = "Preempted"  # the reason for which a Workload is evicted in favour of a more important one
DEACTIVATED: Final = "Deactivated"  # where one is stopped; Kueue adds why, if it does that itself: DueTo...
REPLACED: Final = "WorkloadSliceReplaced"  # the reason with which one ends in whose place another one was admitted


@dataclass(frozen=True, slots=True)
class WorkloadCondition:
    """A condition of a Workload."""

    holds: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorkload:
    """number: it is the job's so manieth. sets: the seats for workers that run stages, by pod set, in its order.
    assigned: how many of them were admitted (0 if it is not). pools: the names of those that each of these sets is for,
    as far as that is known. spare: the seats for spare workers. going: it is being deleted.
    """

    name: str
    uid: str
    version: str  # its resourceVersion
    number: int
    queue: str
    shape: str
    replaces: str | None  # the name of the Workload in whose place it is to be admitted
    active: bool
    going: bool
    sets: Mapping[str, int]
    assigned: int = 0
    spare: int = 0
    given_up: int = 0  # of the seats that are asked for, for the time that it is admitted
    conditions: Mapping[str, WorkloadCondition] = field(default_factory=dict)
    flavors: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by pod set
    domains: Mapping[str, tuple[Domain, ...]] = field(default_factory=dict)  # by pod set
    pools: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by pod set

    def is_true(self, condition: str) -> bool:
        found = self.conditions.get(condition)
        return found is not None and found.holds

    @property
    def asked(self) -> int:
        return sum(self.sets.values())

    def spread(self, seats: int) -> dict[str, int]:
        """So many of its seats: those of the first pod sets."""
        return dict(zip(self.sets, spread_seats(seats, list(self.sets.values())), strict=True))

    @property
    def finished(self) -> bool:
        return self.is_true("Finished")

    @property
    def reserved(self) -> bool:
        """Does it hold quota?"""
        return self.is_true("QuotaReserved")

    @property
    def evicted(self) -> bool:
        """Has it to give back the quota that it holds?"""
        return self.reserved and self.is_true("Evicted")

    @property
    def admitted(self) -> bool:
        return self.reserved and self.is_true("Admitted") and not self.evicted

    @property
    def held(self) -> int:
        """The seats for workers that run stages whose quota it holds: what was assigned, less what was given back."""
        return min(self.assigned, self.asked - self.given_up) if self.reserved else 0

    @property
    def told(self) -> str:
        """What Kueue says of one that waits."""
        found = self.conditions.get("QuotaReserved")
        return found.message if found is not None and not found.holds else ""


def read_workload(thing: Json) -> SeenWorkload:
    metadata, spec, status = thing["metadata"], thing.get("spec") or {}, thing.get("status") or {}
    annotations, name = metadata.get("annotations") or {}, str(metadata["name"])
    assignments = (status.get("admission") or {}).get("podSetAssignments") or ()
    asked = _counts(spec.get("podSets") or ())
    assigned = asked | _counts(assignments) if assignments else {}
    given_up = _counts(status.get("reclaimablePods") or ())
    replaces = annotations.get(REPLACES, annotations.get(INSTEAD_OF))
    pools_of_sets = str(annotations.get(POOLS) or "").split(";")
    number = name.rpartition("-")[2]
    return SeenWorkload(
        name=name,
        uid=str(metadata.get("uid")),
        version=str(metadata.get("resourceVersion")),
        number=int(number) if number.isdecimal() else 0,
        queue=str(spec.get("queueName") or ""),
        shape=str(annotations.get(SHAPE) or ""),
        replaces=None if replaces is None else str(replaces).rpartition("/")[2],
        active=spec.get("active") is not False,
        going=bool(metadata.get("deletionTimestamp")),
        sets=asked,
        assigned=sum(assigned.values()),
        spare=sum(int(one.get("count") or 0) for one in spec.get("podSets") or () if one.get("name") == STANDBY),
        given_up=sum(given_up.values()),
        conditions={
            str(one["type"]): WorkloadCondition(
                one.get("status") == "True", str(one.get("reason") or ""), str(one.get("message") or "")
            )
            for one in status.get("conditions") or ()
        },
        flavors={str(one["name"]): frozenset((one.get("flavors") or {}).values()) for one in assignments},
        domains={str(one["name"]): read_domains(one.get("topologyAssignment")) for one in assignments},
        pools={name: frozenset(pools.split(",")) for name, pools in zip(asked, pools_of_sets, strict=False)},
    )


def _counts(sets: Any) -> dict[str, int]:
    """How many pods each set has that is not of spare ones; those that do not say it are left out."""
    counted = {str(one.get("name")): one.get("count") for one in sets}
    return {name: int(count) for name, count in counted.items() if name != STANDBY and count is not None}
