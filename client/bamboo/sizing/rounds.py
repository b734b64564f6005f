"""Rounds of trials: many candidates at once, on several processes, with progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from bamboo.simulation.processes import in_processes
from bamboo.sizing.trials.trial import Assessment, CandidateTrial, simulate_trial
from bamboo.sizing.trials.world import World


class RoundProgress(Protocol):
    """A context that shows the progress of a round of trials."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def done(self, runs: int) -> None:
        """Record that more runs are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Runner of trials in a world, on so many processes. progress: makes a round's progress from its number of runs and
    its subject.
    """

    world: World
    jobs: int
    progress: Callable[[int, str], RoundProgress]

    def assess(self, about: str, trials: Sequence[CandidateTrial]) -> list[Assessment | None]:
        """Return the assessment of each trial, in order; None for one that the manifest's rules do not allow.

        about: the round's subject in a word. Raises SimulationError if a trial cannot be simulated.
        """
        found: list[Assessment | None] = []
        with self.progress(sum(len(trial.seeds) for trial in trials), f"{about:<10}") as bar:
            simulated = in_processes(partial(simulate_trial, self.world), trials, self.jobs)
            for assessment, trial in zip(simulated, trials, strict=True):
                found.append(assessment)
                bar.done(len(trial.seeds))
        return found
