"""The workers that a job should have now, for the shell that starts and removes them."""

from collections.abc import Collection
from dataclasses import dataclass

from bamboo_core.coordinator.grids.holding import fewest_to_begin, to_have
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.coordinator.workers.membership import surplus_requests
from bamboo_core.job.spec import JobSpec, gives_back
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers:
    """Which workers a job is to have, as its coordinator sees it.

    number: how many, those on standby included; fewest: those of the smallest grid that has room, as far as that is
    known; chosen: it has decided so itself, for what they are worth. requested:
    how many that were asked for have not joined; surplus: how many of these are not wanted any more. gone: workers that
    were declared lost or refused, for good; stopped: these, and workers that were told to leave. misfit:
    the newest one that does not fit to the others, and why. begun: there is a plan. recovering: workers are about to
    come back to a coordinator that was restarted.
    """

    spec: JobSpec
    number: int
    fewest: int
    chosen: bool
    requested: int
    surplus: int
    gone: Collection[WorkerId]
    stopped: Collection[WorkerId]
    misfit: tuple[WorkerId, str] | None
    begun: bool
    recovering: bool


def wanted_workers(state: CoordinatorState) -> WantedWorkers:
    return WantedWorkers(
        spec=state.spec,
        number=to_have(state),
        fewest=fewest_to_begin(state),
        chosen=gives_back(state.spec) and state.holding.target is not None,
        requested=state.membership.requested,
        surplus=surplus_requests(state),
        gone=state.membership.gone,
        stopped=state.membership.gone.union(w for w in state.noticed if state.workers[w].released),
        misfit=state.admission.misfit,
        begun=state.plan is not None,
        recovering=state.phase == "Recovering",
    )
