"""The account of a worker's memory: counted by hand, told, kept and shown."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from bamboo_core.control.channel_events import Received
from bamboo_core.control.codec import decode_from_worker, encode
from bamboo_core.control.memory import MOST, Memory
from bamboo_core.control.protocol import Heartbeat
from bamboo_core.coordinator.job_status import status
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.schedule import Backward, Forward
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.engine.components import Components
from bamboo_trainer.engine.memory_account import MemoryMeter
from bamboo_trainer.engine.steps.cell_step import CellStep
from bamboo_trainer.memory.estimate import measure, worker_memory
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Task
from manifest_kit import bamboojob, training
from stage_kit import CONFIG, begin, small_gpt, small_task, storages
from training_job import Fault, Job
from world import World

TENSOR = 2 * 4 * 4  # bytes of what travels: two samples of four floats


MATRIX = 16 * 4


WEIGHTS = 2 * 2 * MATRIX  # of a stage: two matrices, each with place for a mark, in multiples of 16 floats


ADAM = 2 * (2 * MATRIX + 4)  # two tensors like each matrix, and a counter


M = 4  # microbatches


class Layer(nn.Module):
    """Keeps its inputs and one tensor more for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x).tanh())
        return out


def build(config: dict[str, Any]) -> Task:
    points = torch.arange(32.0).reshape(8, 4) / 32
    return Task(
        layers=(Layer, Layer),
        loss=lambda outputs, targets: (outputs[0] * targets[0]).mean(),  # keeps the targets, and not the outputs
        dataset=TensorDataset((points,), (points.flip(1),)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        learning_rate=lambda step: 0.01,
    )


def manifest(stages: int = 2, pipelines: int = 1, mode: str = "LazyForward", steps: int = 5) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "test_memory_account:build"},
        training=training(steps, 2 * M * pipelines, 2, reproducible=False),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": mode},
        elastic={"minPipelines": 1, "maxPipelines": pipelines, "minStages": stages, "stabilizationSeconds": 0},
    )


def engines(job: Job) -> Iterator[Components]:
    yield from (node.inside for node in job.nodes.values() if node.alive and node.engine.components)


def replace_kinds(memory: Memory, **kinds: int) -> Memory:
    return msgspec.structs.replace(memory, **kinds)


Seen = dict[tuple[int, int, int], Memory]  # by stage, step and instructions done


def watched() -> Seen:
    """What each stage's owner says, when it has done so much of that step."""
    seen: Seen = {}

    def decide(job: Job) -> None:
        for engine in engines(job):
            for run in engine.executor.cells.values():
                seen[run.cell.stage, run.step, run.done] = engine.memory()

    Job(manifest(), decide=decide).run()
    return seen


STATE = Memory(parameters=WEIGHTS, optimizer=ADAM, replica=WEIGHTS + ADAM, gradients=WEIGHTS)


def test_the_account_is_what_one_counts_by_hand() -> None:
    """Stage 0 runs three forwards ahead. What the log holds counts there, and not with the activations."""
    seen = watched()
    assert seen[1, 0, 0] == STATE
    ahead = 3
    kept = replace_kinds(STATE, log=ahead * TENSOR, activations=ahead * 2 * TENSOR)  # the data, and one tensor more
    assert replace_kinds(seen[0, 0, ahead], received=0) == kept
    assert seen[0, 0, ahead].received in (0, TENSOR)
    over = replace_kinds(STATE, log=M * TENSOR)
    assert seen[0, 0, 2 * M] == over  # the backwards are done
    log = 2 * M * TENSOR  # of two steps
    assert seen[0, 2, 2 * M] == replace_kinds(STATE, log=log)


def test_the_last_stage_keeps_the_targets_and_the_loss() -> None:
    seen = watched()
    inputs, kept, targets, loss = TENSOR, TENSOR, TENSOR, 4
    mine = replace_kinds(seen[1, 0, 1], received=0)
    assert mine == replace_kinds(STATE, activations=inputs + kept + targets + loss)


def test_what_is_computed_in_advance_counts_as_redundant() -> None:
    """The shadow of the last stage has its inputs in its own log, and makes the gradients of these."""
    context, gradient = TENSOR + TENSOR + 4, TENSOR  # one tensor of the layer, the targets, the loss
    counted: list[tuple[int, int]] = []

    def decide(job: Job) -> None:
        for engine in engines(job):
            run = engine.executor.cells.get(Cell(0, 0))
            while run and (run.step, run.done) == (3, 2 * M) and engine.redundant.turn((run,)):
                shadow = engine.redundant.shadows[Cell(0, 1)]
                counted.append((len(shadow.work.contexts), len(shadow.gradients)))
                expected = WEIGHTS + counted[-1][0] * context + counted[-1][1] * gradient
                assert engine.memory() == replace_kinds(STATE, log=2 * M * TENSOR, redundant=expected)

    Job(manifest(mode="EagerBackward"), decide=decide).run()
    assert counted[:3] == [(0, 1), (1, 1), (0, 2)]
    assert counted[-1] == (0, M)


def test_the_meter_keeps_the_highest_of_a_step_and_tells_it_once_a_second() -> None:
    job = Job(manifest(), decide=a_second_passes).run()
    assert len(job.nodes) == 2
    for node in job.nodes.values():
        engine = node.engine
        latest = engine.meter.latest
        assert latest is not None
        assert (latest.parameters, latest.replica) == (WEIGHTS, WEIGHTS + ADAM)
        assert latest.log == 2 * M * TENSOR
        assert latest.activations > 0
        told = [at for at in (10.0, 10.2, 10.9, 11.0, 11.1, 12.5) if engine.meter.due(at)]
        assert told == [10.0, 11.0, 12.5]
    assert MemoryMeter(lambda: 0.0).due(1.0) is None


def a_second_passes(job: Job) -> None:
    job.now += 1.0


def test_no_step_is_measured_within_a_second_of_the_one_before() -> None:
    """It is not told more often, and to look at all that is held takes longer than to decide what is next."""
    now, taken, meter = [0.0], list[float](), MemoryMeter(lambda: now[0])

    def account() -> Memory:
        taken.append(now[0])
        return Memory(log=len(taken))

    for step, at in enumerate((0.0, 0.4, 0.9, 1.3, 1.4, 2.3)):
        now[0] = at
        run = CellStep(Cell(0, 0), step, program=[Forward(0), Backward(0)], outer_backwards=(1, 1))
        for run.done in (1, 2):
            if meter.wants(run):
                meter.take(account(), over=run.next is None)
    assert taken == [0.0, 0.0, 1.3, 1.3, 2.3, 2.3]
    assert meter.latest == Memory(log=6)


def test_a_worker_that_runs_nothing_tells_what_it_keeps() -> None:
    """One of four workers is lost, and with it the second pipeline; the other one of that is left with replicas."""

    def decide(job: Job) -> None:
        if job.state.step == 2:
            job.capacity = 3
            job.kill("w3")
        if "w2" not in job.nodes or not (engine := job.nodes["w2"].engine).meter.latest:
            return
        if not job.nodes["w2"].inside.executor.cells:
            told.append(engine.meter.latest)

    told: list[Memory] = []
    Job(manifest(pipelines=2, steps=12), decide=decide, capacity=4).run()
    assert {m.replica for m in told} >= {2 * (WEIGHTS + ADAM), 0}
    assert told[-1] == Memory()  # its replicas were dropped in the end


@pytest.mark.parametrize(("in_memory", "most"), [(True, 2), (False, 0)])
def test_copies_for_checkpoints_count_and_are_estimated(in_memory: bool, most: int) -> None:
    """Each worker writes the layer that it owns. In this job's store it is written at once, so that nothing waits."""
    document = manifest(steps=7)
    kept = {"everySteps": 3, "keepInMemory": in_memory}
    document["spec"]["checkpoint"] = {"storage": {"uri": "memory://x"}, **kept}
    layer = 2 * MATRIX + ADAM
    seen: set[int] = set()

    def decide(job: Job) -> None:
        seen.update(engine.memory().copies for engine in engines(job))

    job = Job(document, decide=decide).run()
    assert seen == {times * layer for times in range(most + 1)}
    _, estimated = worker_memory(measure(job.task, job.spec), [(0, 1), (1, 2)], job.spec, taken_over=False)
    assert estimated.copies == max(most, 1) * layer, "without memory one waits to be written"


@pytest.mark.parametrize(("stages", "pipelines"), [(2, 1), (2, 2)])
def test_the_log_is_bounded_and_its_bytes_are_those_of_the_account(stages: int, pipelines: int) -> None:
    """At every turn, with a takeover in between: two steps at most; every storage once, if it is no gradient."""

    def decide(job: Job) -> None:
        for engine in engines(job):
            frames = list(engine.outbox.log.frames())
            assert {f.address.step for f in frames} <= {engine.step - 1, engine.step}
            held = storages([t for f in frames for t in f.tensors])
            cells = engine.executor.cells.values()
            gradients = [tensor for run in cells if run.work for tensor in run.work.gradients.tensors()]
            gradients += [run.final for run in cells if run.final is not None]
            gradients += [
                g for state in engine.states.by_stage.values() for final in state.final.values() for g in final
            ]
            elsewhere = storages(gradients)
            assert engine.memory().log == sum(size for at, size in held.items() if at not in elsewhere)
            most.append(engine.memory().log)

    most: list[int] = []
    fault = Fault("Backward", Cell(pipelines - 1, 1), 2, M * (pipelines - 1))
    job = Job(manifest(stages, pipelines, steps=8), (fault,), decide).run()
    assert not job.faults
    both = 2 * 2 * M * TENSOR  # two steps of activations and gradients: of all stages, when a worker has taken over
    assert 0 < max(most) <= both + (3 * WEIGHTS * 2 if pipelines > 1 else 0)


def test_casts_of_parameters_count_once(tmp_path) -> None:
    """In bf16 all microbatches share them, also those of a parameter that two layers share."""
    config = replace(CONFIG, precision="bf16")
    sizes = []
    for tied in (False, True):
        stage = build_stage(small_gpt(tmp_path, tieEmbeddings=tied), 0, [(0, 4)], config)
        assert stage.context is None
        stage.forward(begin(stage), 0, 0, None)
        assert stage.context is not None
        sizes.append(stage.context)
    matrices = 2 * 12 * 16 * 16 + 256 * 16  # blocks and head
    assert [size.casts for size in sizes] == [2 * matrices, 2 * matrices]


class Functional(nn.Linear):
    """Cannot run under hooks for saved tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: (y * y).sum())(x.detach())
        return super().forward(x) + 0 * slope


def test_a_layer_that_cannot_be_measured_still_runs() -> None:
    stage = build_stage(small_task(layers=(lambda: nn.Linear(2, 2), lambda: Functional(2, 2))), 0, [(0, 2)], CONFIG)
    work = begin(stage)
    stage.forward(work, 0, 0, None)
    stage.backward(work, 0, 0, None)
    assert work.gradients.target.any()
    assert stage.context is not None
    assert stage.context.here == 0


def test_an_optimizer_that_starts_late_is_counted_once_it_has_started() -> None:
    late = small_task(optimizer=lambda named: torch.optim.SGD([p for _, p in named], momentum=0.9, dampening=0.5))
    stage, other = (build_stage(late, 0, [(0, 3)], CONFIG) for _ in range(2))
    assert stage.values.state_bytes()[1] == other.values.state_bytes()[1] == 0
    stage.values.apply(torch.ones(stage.values.final.size), 1.0)
    assert stage.values.state_bytes()[1] == 4 * (2 * 3 + 3 + 3 * 2 + 2)
    other.values.restore(*stage.values.snapshot())
    assert other.values.state_bytes() == stage.values.state_bytes()


def test_memory_travels_with_the_heartbeat() -> None:
    beat = Heartbeat(step=3, doing="training", memory=Memory(parameters=5, log=MOST))
    assert decode_from_worker(encode(beat)) == beat
    assert decode_from_worker('{"type":"Heartbeat","step":3}') == Heartbeat(step=3)


@pytest.mark.parametrize("wrong", ['{"log":-1}', '{"log":1.5}', f'{{"log":{MOST + 1}}}', '{"lag":1}', "7"])
def test_a_wrong_account_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="malformed message"):
        decode_from_worker(f'{{"type":"Heartbeat","step":3,"memory":{wrong}}}')


def test_the_coordinator_keeps_the_newest_of_each_worker_and_the_largest_of_all() -> None:
    world = World(2, 1, 0)
    world.settle()
    for worker, size in (("w0", 9), ("w1", 7), ("w0", 3)):
        world.tell(Received(worker, Heartbeat(step=1, memory=Memory(log=size, received=1))))
        world.tell(Received(worker, Heartbeat(step=1)))
    shown = status(world.state, world.now)
    assert dict(shown.memory) == {"w0": Memory(log=3, received=1), "w1": Memory(log=7, received=1)}
    assert shown.most_memory == ("w0", Memory(log=9, received=1))
    world.lose("w0")
    shown = status(world.state, world.now)
    assert set(dict(shown.memory)) == {"w1"}
    assert shown.most_memory == ("w0", Memory(log=9, received=1))


def test_the_highest_is_taken_kind_by_kind() -> None:
    highest = Memory(log=1, received=5).highest(Memory(log=3, gradients=2))
    assert (highest, highest.total) == (Memory(log=3, received=5, gradients=2), 10)
