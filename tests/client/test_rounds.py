"""Rounds of trials."""

from contextlib import nullcontext
from dataclasses import replace

from bamboo.sizing.rounds import Trials
from bamboo.sizing.trials.candidate import as_the_job_is
from bamboo.sizing.trials.trial import CandidateTrial, simulate_trial
from job_simulation_kit import manifest
from sizing_kit import layered, world


class Bar(nullcontext["Bar"]):
    """What a round has told of how far it is."""

    def __init__(self) -> None:
        super().__init__(self)
        self.begun: list[tuple[int, str]] = []
        self.counted: list[int] = []

    def done(self, runs: int) -> None:
        self.counted.append(runs)


def test_candidates_that_the_rules_forbid_have_no_runs_and_others_are_in_their_order() -> None:
    at = world(manifest(2, 1, 6), layered(3))
    good = as_the_job_is("m", at.spec)
    trials = [CandidateTrial(candidate=c, seeds=(1,), seconds=60.0) for c in (good, replace(good, micro_batch=5), good)]
    bar = Bar()

    def begun(runs: int, about: str) -> Bar:
        bar.begun.append((runs, about))
        return bar

    found = Trials(world=at, jobs=1, progress=begun).assess("grids", trials)
    assert [one is None for one in found] == [False, True, False]
    assert found[0] == found[2] == simulate_trial(at, trials[0])
    assert (bar.begun, bar.counted) == ([(3, "grids     ")], [1, 1, 1])
