"""Do all who hold a state agree on it, so that it may be kept for good? Pure."""

from typing import Final

from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.coordinator.verification.evidence import StatePlace
from bamboo_core.job.placement_spec import VerifyMode
from bamboo_core.planning.plan import WorkerId

WAIT_SECONDS: Final = 10.0  # for sums of all who hold a state: who was filled later, or is lost, never tells


def is_on(state: CoordinatorState) -> bool:
    return state.spec.redundancy.verify is not VerifyMode.NONE


def replaces(state: CoordinatorState) -> bool:
    return state.spec.redundancy.verify is VerifyMode.REPLACE


def holders(state: CoordinatorState, number: int) -> set[WorkerId]:
    return set(state.certain_holders(state.current_plan)[number]) & state.workers.keys()


def is_settled(state: CoordinatorState, version: int, since: float, now: float) -> bool:
    """May a state of that version be kept for good? Not while its holders differ, or some of them have not told. since:
    they could have; if they do not, it is not for ever.
    """
    if not replaces(state) or state.plan is None or state.plan.mixed or state.plan.first_step >= version:
        return True
    v = state.verification
    if v.differing:
        return False
    told = (v.sums.get(StatePlace(number, version), {}) for number in range(len(state.plan.stages)))
    missing = any(holders(state, number) - sums.keys() for number, sums in enumerate(told))
    return not missing or now - since > WAIT_SECONDS
