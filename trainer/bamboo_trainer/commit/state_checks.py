"""Checksums of the states held here; the coordinator compares those of all holders. See docs/design/determinism.md.

A job without `training.deterministic` sends none, as its copies need not be equal.
"""

from typing import Final

from bamboo_core.control.guard import StateSums
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.stage.checksums import in_hexadecimal
from bamboo_trainer.stage.stage_states import StageStates

EVERY: Final = 32  # steps; see docs/benchmarks.md
KEPT: Final = 2  # versions of each stage that are sent again: a connection may lose messages


def is_due(version: int) -> bool:
    """Return whether a version is checked: each power of 2, and each multiple of EVERY."""
    return version % EVERY == 0 or version & (version - 1) == 0


class StateChecks:
    """Sends checksums to the coordinator: for each stage, the newest versions and that of the newest checkpoint."""

    def __init__(
        self, states: StageStates, log: CommitLog, coordinator: Coordinator, *, steps: int, deterministic: bool
    ) -> None:
        self._states, self._log, self._coordinator, self._steps = states, log, coordinator, steps
        self._deterministic = deterministic
        self._sent: dict[int, dict[int, StateSums]] = {}
        self._checkpoint = (
            0  # version of the newest one: the coordinator commits it once all holders sent its checksums
        )

    def take_roles(self) -> None:
        """Forget the checksums of stages that are no longer held here."""
        self._sent = {index: sums for index, sums in self._sent.items() if index in self._states}

    def look(self, index: int) -> None:
        """Send the checksums of a stage's state, if its version is checked and not sent yet. Raises TaskError if a
        buffer has changed.
        """
        held = self._states.here(index)
        if held is None or not self._deterministic or not self._is_due(held.version):
            return
        if held.version not in self._sent.get(index, {}):
            self._tell(index)

    def copied(self, index: int) -> None:
        """Send a stage's checksums after it was copied for a checkpoint, if they differ from the ones sent before.

        The coordinator gets them before the copies are written.
        """
        held = self._states.here(index)
        if held is not None and held.version in self._sent.get(index, {}):
            self._tell(index)

    def _tell(self, index: int) -> None:
        held, by_version = self._states[index], self._sent.setdefault(index, {})
        sums = {name: in_hexadecimal(number) for name, number in held.checksums().items()}
        current = StateSums(stage=index, version=held.version, sums=sums)
        if current == by_version.get(held.version):
            return
        if self._is_of_checkpoint(held.version):
            self._checkpoint = max(self._checkpoint, held.version)
        by_version[held.version] = current
        newest = {*sorted(by_version)[-KEPT:], self._checkpoint}
        self._sent[index] = {version: by_version[version] for version in sorted(newest & by_version.keys())}
        self._coordinator.tell(current)

    def _is_due(self, version: int) -> bool:
        """Return whether all holders check this version: at intervals, the last state, and each checkpoint's."""
        due = is_due(version) or version in (self._steps, self._log.end)
        return due or self._is_of_checkpoint(version)

    def _is_of_checkpoint(self, version: int) -> bool:
        commit = self._log.commits.get(version - 1)
        return commit is not None and commit.checkpoint is not None

    def report(self) -> None:
        """Send all kept checksums to the coordinator again."""
        for by_version in self._sent.values():
            for sums in by_version.values():
                self._coordinator.tell(sums)
