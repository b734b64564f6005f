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
    """The workers that a job's coordinator wants.

    number: how many, including standby. fewest: the number for the smallest grid that has room, as far as known.
    chosen: the coordinator has chosen the number by the workers' prices. requested: how many requested workers have not
    joined. surplus: how many of these are not wanted any more. gone: workers declared lost or refused, for good.
    stopped: these, and workers that were asked to leave. misfit: the newest worker that does not fit the others, and
    why. begun: there is a plan. recovering: workers are about to reconnect to a restarted coordinator.
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
