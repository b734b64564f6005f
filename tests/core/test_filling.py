"""Copies that new workers receive before the layers are split anew, in jobs of the real coordinator in virtual time."""

import re

import msgspec

from bamboo.simulation.job.job_run import JobRun
from bamboo.traces.trace import make_trace
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import LayerBytes, Machine
from job_simulation_kit import HOUR, job, manifest, nodes, profile, run
from slow_world import Slowed

LOST, BACK = 600.0, 2400.0
TRACE = nodes(
    6, (LOST, "remove", "n1"), (LOST + 120, "remove", "n3"), (BACK, "add", "n6"), (BACK, "add", "n7"), duration=HOUR
)


def elastic() -> JobRun:
    """Return a job of twelve layers on up to six workers. One connection takes 0.3 s to transfer a layer's state."""
    made = job()
    document = manifest(None, 1, 6, elastic={"maxWorkers": 6, "stabilizationSeconds": 60})
    model = profile(12, made.profile.network, forward=0.01, backward=0.02, parameters=100_000, optimizer=200_000)
    model = msgspec.structs.replace(model, times=made.profile.times, machine=Machine(memory=10**9))
    return JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())


def told_of(one: JobRun) -> list[tuple[float, str, str]]:
    """Run the job on TRACE. Return the time in seconds, the reason and the message of each event."""
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
    short, back = pauses(told)[-2:]
    assert back < 0.7 * short, "nobody is filled while the job is short of workers"


def of_two_stages() -> Slowed:
    """Return a job that has shrunk from four stages to two, and that three new workers are about to join."""
    size = LayerBytes(parameters=100, optimizer=200, gradients=100, activations=0, boundary=0)
    told = protocol.Profile(costs=(1e12,) * 8, layers=(size,) * 8, memory=4000)
    world = Slowed(4, 1, 1, chooses=("stages",), profile=told)
    world.train(10)
    world.away = 1000
    idle = world.state.workers.keys() - world.state.current_plan.owners()
    for worker in (*idle, world.owner(1), world.owner(3)):
        world.lose(worker)
        world.train(30)
    for name in ("n0", "n1", "n2"):
        world.pending.append(WorkerJoined(protocol.Hello(worker=name, host="h", port=1)))
        world.pending.append(Received(name, protocol.WorkerReady()))
    return world


def test_newcomers_keep_the_stages_that_they_will_need() -> None:
    world = of_two_stages()
    count = len(world.plans)
    world.train(30)
    assert len(world.state.current_plan.stages) == 4
    split = [plan for plan in world.plans[count:] if len(plan.stages) == 2]
    found = {w: {c.stage for plan in split for c in plan.replicated_by(w)} for w in ("n0", "n1", "n2")}
    assert {w: stages for w, stages in found.items() if stages} == {"n0": {0, 1}, "n1": {1}}
