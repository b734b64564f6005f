"""Sums of the states that are held here, for the coordinator, which compares those of all holders.

See docs/design/determinism.md. Nothing is sent for a job without `training.deterministic`, whose copies need not be
equal.
"""

from typing import Final

from bamboo_core.control.guard import StateSums
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.stage.checksums import in_hexadecimal
from bamboo_trainer.stage.stage_states import StageStates

EVERY: Final = 32  # steps; see docs/benchmarks.md
KEPT: Final = 2  # versions of each stage that are told again: a message may be lost with its connection


def is_due(version: int) -> bool:
    """At the beginning, soon after it, and then every so many steps."""
    return version % EVERY == 0 or version & (version - 1) == 0


class StateChecks:
    """told: the newest versions of each stage, and that of the newest checkpoint, oldest first."""

    def __init__(
        self, states: StageStates, log: CommitLog, coordinator: Coordinator, *, steps: int, deterministic: bool
    ) -> None:
        self._states, self._log, self._coordinator, self._steps = states, log, coordinator, steps
        self._deterministic = deterministic
        self._told: dict[int, dict[int, StateSums]] = {}
        self._checkpoint = 0  # the version of the newest one: the coordinator commits it when all have told its sums

    def take_roles(self) -> None:
        """What is not held here any more is not told."""
        self._told = {index: told for index, told in self._told.items() if index in self._states}

    def look(self, index: int) -> None:
        """The state of a stage may be new here: tell its sums, if all holders tell those of that version. Raises
        TaskError if a buffer has changed.
        """
        held = self._states.here(index)
        if held is None or not self._deterministic or not self._is_due(held.version):
            return
        if held.version not in self._told.get(index, {}):
            self._tell(index)

    def copied(self, index: int) -> None:
        """Copies of the state of a stage were made, for a checkpoint. If it is not what was told any more, the
        coordinator hears it before they are written.
        """
        held = self._states.here(index)
        if held is not None and held.version in self._told.get(index, {}):
            self._tell(index)

    def _tell(self, index: int) -> None:
        held, told = self._states[index], self._told.setdefault(index, {})
        sums = {name: in_hexadecimal(number) for name, number in held.checksums().items()}
        said = StateSums(stage=index, version=held.version, sums=sums)
        if said == told.get(held.version):
            return
        if self._is_of_checkpoint(held.version):
            self._checkpoint = max(self._checkpoint, held.version)
        told[held.version] = said
        newest = {*sorted(told)[-KEPT:], self._checkpoint}
        self._told[index] = {version: told[version] for version in sorted(newest & told.keys())}
        self._coordinator.tell(said)

    def _is_due(self, version: int) -> bool:
        """Now and then, of the last state, and of each that a checkpoint is taken of."""
        due = is_due(version) or version in (self._steps, self._log.end)
        return due or self._is_of_checkpoint(version)

    def _is_of_checkpoint(self, version: int) -> bool:
        commit = self._log.commits.get(version - 1)
        return commit is not None and commit.checkpoint is not None

    def report(self) -> None:
        """To the coordinator, which may have missed it."""
        for told in self._told.values():
            for said in told.values():
                self._coordinator.tell(said)
