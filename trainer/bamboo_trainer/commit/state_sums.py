"""Sums of the states that are held here, for the coordinator, which compares those of all holders.

See docs/design/verify.md. With `redundancy.verify` only; without it, `StateComparison` ends a job whose states differ.
"""

from collections.abc import Iterable
from typing import Final

from bamboo_core.control.verification import StateSum
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.routing.plan_state import PlanState
from bamboo_trainer.stage.checksums import in_hexadecimal
from bamboo_trainer.stage.stage_states import StageStates

EVERY: Final = 32  # steps; see docs/benchmarks.md


def is_due(version: int) -> bool:
    """At the beginning, soon after it, and then every so many steps."""
    return version % EVERY == 0 or version & (version - 1) == 0


class StateSums:
    """said: the newest of each state."""

    def __init__(
        self,
        plan: PlanState,
        states: StageStates,
        log: CommitLog,
        coordinator: Coordinator,
        *,
        steps: int,
        verifies: bool,
    ) -> None:
        self._plan, self._states, self._log, self._coordinator = plan, states, log, coordinator
        self._asked, self._steps, self.verifies = frozenset[int](), steps, verifies
        self._said: dict[int, StateSum] = {}

    def ask(self, versions: Iterable[int]) -> None:
        """The versions of which the coordinator wants to know the sums, and no earlier ones."""
        self._asked = frozenset(versions)

    def take_roles(self) -> None:
        """What is not held here any more is not told."""
        self._said = {index: said for index, said in self._said.items() if index in self._states}

    def look(self, index: int) -> None:
        """The state of a stage may be new here: tell its sum, if all holders do of that version."""
        held = self._states.here(index)
        if held is None or not self.verifies or self._plan.current.mixed or not self._is_due(held.version):
            return
        if index in self._said and self._said[index].version == held.version:
            return
        said = StateSum(stage=index, version=held.version, sum=in_hexadecimal(held.state_sum()))
        self._said[index] = said
        self._coordinator.tell(said)

    def copied(self, index: int) -> None:
        """Copies of the state of a stage were made, for a checkpoint: is it still what was told?

        The coordinator is told if not, before the copies are written.
        """
        held, said = self._states.here(index), self._said.get(index)
        if held is None or said is None or said.version != held.version:
            return
        found = in_hexadecimal(held.state_sum())
        if found != said.sum:
            self._said[index] = StateSum(stage=index, version=held.version, sum=found)
            self._coordinator.tell(self._said[index])

    def _is_due(self, version: int) -> bool:
        """Now and then, of the last state, of each that a checkpoint is taken of, and when the coordinator asks."""
        if version == 0:
            return False
        commit, last = self._log.commits.get(version - 1), version in (self._steps, self._log.end)
        return (
            is_due(version) or last or version in self._asked or (commit is not None and commit.checkpoint is not None)
        )

    def report(self) -> None:
        """To the coordinator, which may have missed it."""
        for said in self._said.values():
            self._coordinator.tell(said)
