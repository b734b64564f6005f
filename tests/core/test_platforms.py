"""Refusal of workers whose platform would give other bits than the job's, or whose data differ."""

from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from bamboo_core.checkpoint.manifest import DataRecord
from bamboo_core.control import protocol
from bamboo_core.control.platform import Platform, conflicts
from bamboo_core.control.protocol import Received, WorkerJoined
from bamboo_core.coordinator.events import Outcome, Tick
from bamboo_core.coordinator.records.workers import MOST_WAIT_SECONDS, Admission
from bamboo_core.planning.plan import Cell
from checkpoint_world import lose_stage, made, save, train
from world import World, back, restarted

A100 = Platform(
    data_plane=2,
    numerics=1,
    torch="2.9.0",
    cuda="12.8",
    driver="535.104.05",
    device="NVIDIA A100-SXM4-80GB",
    capability="AVX2",
    threads=1,
    settings=("A",),
    compiler="g++ 12",
)
H100 = replace(A100, device="NVIDIA H100 80GB HBM3")
OTHER_TORCH = replace(A100, torch="2.10.0")
OTHER_DRIVER = replace(A100, driver="550.54.15")
OTHER_WIRE = replace(A100, data_plane=3)
OTHER_COMPILER = replace(A100, compiler="g++ 14")


def of(*platforms: Platform) -> dict[str, Platform]:
    return {f"w{i}": platform for i, platform in enumerate(platforms)}


def world_of(*platforms: Platform, stages: int = 2, pipelines: int = 1, standby: int = 0, **more: Any) -> World:
    world = World(stages, pipelines, standby, platforms=of(*platforms), **more)
    world.settle()
    return world


def told(world: World) -> list[str]:
    return [emit.message for emit in world.told if emit.reason == "PlatformMismatch"]


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        (A100, ""),
        (H100, "device NVIDIA H100 80GB HBM3 instead of NVIDIA A100-SXM4-80GB"),
        (OTHER_TORCH, "torch 2.10.0 instead of 2.9.0"),
        (OTHER_WIRE, "data plane version 3 instead of 2"),
        (
            replace(A100, numerics=2, cuda="", device="x86_64"),
            "numerics version of Bamboo 2 instead of 1, CUDA an unknown one instead of 12.8,"
            " device x86_64 instead of NVIDIA A100-SXM4-80GB",
        ),
        (replace(A100, driver="550.54.15"), "GPU driver 550.54.15 instead of 535.104.05"),
        (replace(A100, capability="AVX512"), "torch's kernels on the processor for AVX512 instead of AVX2"),
        (replace(A100, instructions=("avx2", "fma")), "vector instructions with avx2, fma"),
        (replace(A100, threads=2), "number of torch's threads 2 instead of 1"),
        (replace(A100, settings=("B", "C")), "settings with B, C and without A"),
        (replace(A100, settings=tuple("ABCDEFGHI")), "settings with B, C, D, E, F, G, 2 more"),
        (replace(A100, compiler="g++ 14"), "compiler g++ 14 instead of g++ 12"),
    ],
)
def test_what_workers_of_one_job_may_differ_in(platform: Platform, why: str) -> None:
    assert conflicts(platform, A100) == why


@pytest.mark.parametrize("other", [H100, OTHER_TORCH, OTHER_DRIVER])
def test_a_replacement_that_gives_other_bits_is_refused_and_another_one_is_asked_for(other: Platform) -> None:
    world = world_of(A100, A100, other, A100)
    plan = world.plan
    world.lose(plan.at(Cell(0, 1)).owner)
    world.settle()
    assert world.state.workers.keys() == {"w0", "w3"}
    assert len(world.plan.owned_by("w3")) == 1
    (message,) = told(world)
    assert message.startswith("w2 has ")
    assert message.endswith(", unlike w0")
    assert world.state.admission.misfit == ("w2", message)
    assert world.state.membership.preemptions == 1, "the refused one counts as no loss"


def test_a_job_begins_with_what_most_of_its_workers_are() -> None:
    """The job runs on the platform of most of its workers, not on that of its first worker."""
    world = world_of(H100, A100, A100, A100, A100, stages=4)
    assert world.state.phase == "Running"
    assert world.state.workers.keys() == {"w1", "w2", "w3", "w4"}
    assert len(told(world)) == 1


def test_with_fewer_workers_than_asked_for_it_begins_with_those_that_fit_together() -> None:
    """A job begins once enough workers of one platform are ready, and only then refuses the others."""
    world = World(2, 2, 0, chooses=("pipelines",), platforms=of(H100, A100, A100, A100, A100))
    world.pending = deque(event for event in world.pending if "w3" not in str(event))  # which does not come
    world.settle()
    first = world.plans[0]
    assert (len(first.pipelines), {w for c in first.cells() for w in first.at(c).holders}) == (1, {"w1", "w2"})
    assert len(told(world)) == 1
    assert "w0" not in world.state.workers


def test_a_restarted_coordinator_refuses_the_same_ones() -> None:
    world = world_of(A100, A100)
    plan = restarted(world)
    for worker in ("w0", "w1"):
        world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=plan, platform=A100)))
        world.tell(Received(worker, protocol.WorkerReady()))
    world.tell(WorkerJoined(protocol.Hello(worker="w9", host="h", port=1, platform=H100)))
    assert len(told(world)) == 1
    assert world.state.workers.keys() == {"w0", "w1"}
    back(world, "w1", plan)
    assert world.state.workers["w1"].platform == A100, "after a cut it is who it was"


@pytest.mark.parametrize("compiled", [False, True])
def test_the_compiler_matters_to_jobs_whose_layers_are_compiled(compiled: bool) -> None:
    """A job with compiled layers refuses a worker with another compiler; a job without compiled layers takes it."""
    world = world_of(A100, A100, OTHER_COMPILER, A100, compiled=compiled)
    world.lose(world.plan.at(Cell(0, 1)).owner)
    world.settle()
    assert world.plan.owned_by("w3" if compiled else "w2")
    assert [message.partition(", unlike")[0] for message in told(world)] == (
        ["w2 has compiler g++ 14 instead of g++ 12"] if compiled else []
    )


OTHER_DATA = DataRecord(samples=400, order="1" * 16)
DATA = DataRecord(samples=400, order="0" * 16)


def refused_in_a_row(world: World, data: protocol.WorkerReady, most: int = 100) -> list[float]:
    """Let new workers report `data`, until `most` refusals or 2,000 turns. Return the seconds between the refusals."""
    at: list[float] = []
    for _ in range(2000):
        for event in list(world.pending):
            if isinstance(event, Received) and isinstance(event.message, protocol.WorkerReady):
                world.pending[world.pending.index(event)] = Received(event.worker, data)
        before = world.state.admission.in_a_row
        world.now += 0.3
        world.deliver() if world.pending else world.tell(Tick())
        if world.state.admission.in_a_row > before:
            at.append(world.now)
        if world.finish or len(at) >= most:
            break
    return [later - earlier for earlier, later in pairwise(at)]


@pytest.mark.parametrize(
    ("known", "other", "text"),
    [
        (protocol.WorkerReady(samples=400, steps=50), protocol.WorkerReady(samples=300, steps=50), "300 samples"),
        (protocol.WorkerReady(samples=400, steps=50), protocol.WorkerReady(samples=400, steps=40), "40 steps"),
        (
            protocol.WorkerReady(samples=400, steps=50, data=DATA),
            protocol.WorkerReady(samples=400, steps=50, data=OTHER_DATA),
            f"one of digest {'1' * 16}",
        ),
    ],
)
def test_workers_with_other_data_are_asked_for_ever_more_slowly_and_the_others_train_on(
    known: protocol.WorkerReady, other: protocol.WorkerReady, text: str
) -> None:
    world = World(2, 2, 1)
    world.settle()
    world.tell(Received("w0", known))
    world.lose(world.plan.at(Cell(0, 1)).owner)
    apart = refused_in_a_row(world, other, most=world.spec.backoff_limit + 2)
    assert apart == sorted(apart), "each is waited for longer than the one before"
    assert sum(apart) > 25
    assert Admission(in_a_row=5000).refusing("w9", "", 0.0).ask_at == MOST_WAIT_SECONDS
    assert world.finish is None
    before = world.state.step
    train(world, before + 2)
    assert sum(f" has data with {text}, and those " in event.message for event in world.told) == len(apart) + 1


def test_workers_with_other_data_end_a_job_that_cannot_train_without_them() -> None:
    world = made(3)
    known, other = (protocol.WorkerReady(samples=samples, steps=10_000) for samples in (400, 300))
    world.tell(Received("w0", known))
    world.found = protocol.CheckpointFound(number=0, checkpoint=save(world))
    lose_stage(world)
    assert len(refused_in_a_row(world, other)) == world.spec.backoff_limit
    assert (world.end.outcome, world.end.reason) == (Outcome.FAILED, "DataMismatch")
    assert world.end.message.startswith("7 new workers in a row had other data than the job; the last one, w")


def test_a_worker_with_the_right_data_ends_the_row() -> None:
    world = World(2, 2, 1)
    world.settle()
    known, other = (protocol.WorkerReady(samples=samples, steps=50) for samples in (400, 300))
    world.tell(Received("w0", known))
    world.lose(world.plan.at(Cell(0, 1)).owner)
    refused_in_a_row(world, other, most=3)
    assert world.state.admission.in_a_row == 3
    refused_in_a_row(world, known)
    assert (world.state.admission.in_a_row, world.finish) == (0, None)
    assert len(world.state.workers) == 5
