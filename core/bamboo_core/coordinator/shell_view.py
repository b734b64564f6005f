"""What a coordinator's shell goes by when it looks after a job: which workers are wanted, and the status beside that.

It is one value, which two states have in common if there is nothing else to be done and nothing else to be told.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter, is_not
from typing import Final

from bamboo_core.coordinator.events import PROGRESS
from bamboo_core.coordinator.grids.holding import to_have
from bamboo_core.coordinator.job_status import status
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.coordinator.workers.membership import surplus_requests
from bamboo_core.job.spec import JobSpec, gives_back
from bamboo_core.planning.plan import WorkerId

_records: Final = attrgetter(*(one.name for one in fields(CoordinatorState) if one.name not in ("workers", "guard")))
NO_TIME: Final = 0.0  # at which a status is made that is compared: ages are the same as long as nothing happens


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers:
    """Which workers a job is to have, as its coordinator sees it.

    number: how many, those on standby included; chosen: it has decided so itself, for what they are worth. requested:
    how many that were asked for have not joined; surplus: how many of these are not wanted any more. gone: workers that
    were declared lost or refused, for good. misfit: the newest one that does not fit to the others, and why. begun:
    there is a plan. recovering: workers are about to come back to a coordinator that was restarted.
    """

    spec: JobSpec
    number: int
    chosen: bool
    requested: int
    surplus: int
    gone: Collection[WorkerId]
    misfit: tuple[WorkerId, str] | None
    begun: bool
    recovering: bool


def wanted_workers(state: CoordinatorState) -> WantedWorkers:
    return WantedWorkers(
        spec=state.spec,
        number=to_have(state),
        chosen=gives_back(state.spec) and state.holding.target is not None,
        requested=state.membership.requested,
        surplus=surplus_requests(state),
        gone=state.membership.gone,
        misfit=state.admission.misfit,
        begun=state.plan is not None,
        recovering=state.phase == "Recovering",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellView:
    """facts: of the status, all but the progress of steps, which a shell writes down at its own rate."""

    wanted: WantedWorkers
    facts: tuple[object, ...]


def shell_view(state: CoordinatorState) -> ShellView:
    """Compared as a whole: what is new in a status counts, unless it is marked as progress there."""
    return ShellView(wanted=wanted_workers(state), facts=_facts(status(state, NO_TIME)))


def _facts(value: object) -> tuple[object, ...]:
    assert is_dataclass(value)
    found = (getattr(value, one.name) for one in fields(value) if one.metadata != PROGRESS)
    return tuple(_facts(one) if is_dataclass(one) else one for one in found)


def may_look_different(before: CoordinatorState, after: CoordinatorState) -> bool:
    """Is any record another one, but for what workers say all the time? Then it is worth to make a view of it."""
    if after is before:
        return False
    return before.workers.roster is not after.workers.roster or any(map(is_not, _records(before), _records(after)))
