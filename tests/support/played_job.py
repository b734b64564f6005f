"""The base class of jobs whose coordinator a test drives. `finish` is None while the job runs."""

from bamboo_core.coordinator.events import Finish, Outcome
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.plan import Plan


class PlayedJob:
    state: CoordinatorState
    finish: Finish | None

    @property
    def plan(self) -> Plan:
        """The newest plan. The job must have one."""
        return self.state.current_plan

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended; None while it runs."""
        return self.finish.outcome if self.finish else None

    @property
    def end(self) -> Finish:
        """The end of the job. The job must have ended."""
        assert self.finish is not None, "the job goes on"
        return self.finish
