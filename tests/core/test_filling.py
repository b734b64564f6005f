"""Newcomers are filled before the layers are split anew: jobs of the real coordinator in virtual time."""

import re

import msgspec

from bamboo.profiles.profile import Machine
from bamboo.simulation.job.job_run import JobRun
from bamboo.traces.trace import make_trace
from job_simulation_kit import HOUR, job, nodes, profile, run

LOST, BACK = 600.0, 2400.0
TRACE = nodes(
    6, (LOST, "remove", "n1"), (LOST + 120, "remove", "n3"), (BACK, "add", "n6"), (BACK, "add", "n7"), duration=HOUR
)


def elastic(memory: int = 10**9) -> JobRun:
    """Twelve layers on six workers, or on as many as are there. A layer's state takes 0.3 s on its way."""
    made = job(6, 1, elastic={"minStages": 1, "minPipelines": 1, "stabilizationSeconds": 60})
    model = profile(12, made.profile.network, forward=0.01, backward=0.02, parameters=100_000, optimizer=200_000)
    model = msgspec.structs.replace(model, times=made.profile.times, machine=Machine(memory=memory))
    return JobRun(spec=made.spec, manifest=made.manifest, profile=model, trace=make_trace())


def told_of(one: JobRun) -> list[tuple[float, str, str]]:
    """When, the reason and the text of each event."""
    told: list[str] = []
    run(one, TRACE, told=told)
    found = [re.fullmatch(r"\s*([\d.]+) s  (\w+): (.*)", line) for line in told]
    return [(float(match[1]), match[2], match[3]) for match in found if match]


def reasons(told: list[tuple[float, str, str]], since: float) -> list[str]:
    wanted = ("Replicating", "Resplitting", "Resplit")
    return [reason for at, reason, _ in told if at >= since and reason in wanted]


def pauses(told: list[tuple[float, str, str]]) -> list[float]:
    return [float(match[1]) for _, _, text in told if (match := re.search(r"after ([\d.]+) s in which", text))]


def test_newcomers_are_filled_before_the_cut_and_the_pause_is_shorter() -> None:
    told = told_of(elastic())
    assert reasons(told, BACK) == ["Replicating", "Resplitting", "Resplit"]
    (filled,) = [text for at, reason, text in told if at > BACK and reason == "Replicating"]
    assert "sim-w6, sim-w7" in filled
    without = told_of(elastic(memory=100))
    assert reasons(without, BACK) == ["Resplitting", "Resplit"], "they have no room for states of the old stages"
    assert pauses(told)[-1] < 0.7 * pauses(without)[-1]
