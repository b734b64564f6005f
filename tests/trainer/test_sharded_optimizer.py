"""Pipelines of one stage with the optimizer's state in shards: the same bits as without, also after kills."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import Cell
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.engine.memory_account import account
from bamboo_trainer.memory.estimate import measure, worker_memory
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.stage.whole_model import WholeModel
from bamboo_trainer.task import Evaluation, Task
from bamboo_trainer.tasks.inspection.costs import trained_sizes
from bamboo_trainer.training import TrainingConfig
from branching_job import Kind, kill_at_each, of_role, sweep
from manifest_kit import bamboojob, gpt_task, training
from stage_kit import small_task
from training_job import Fault, Job, MemoryStore

STEPS = 4


class Block(nn.Module):
    """With running buffers, a parameter that is never trained, and random numbers in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1)
        self.offset = nn.Parameter(torch.randn(width), requires_grad=False)

    def forward(self, given: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.norm(self.linear(given)))) + self.offset


def build(config: Mapping[str, Any]) -> Task:
    points = torch.linspace(-1, 1, 96).reshape(24, 4)
    return small_task(
        layers=tuple(functools.partial(Block, 4) for _ in range(5)),
        dataset=TensorDataset((points,), (points.flip(1),)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05),
        evaluation=Evaluation(dataset=TensorDataset((points.flip(0),), (points,))),
    )


def manifest(
    pipelines: int, *, shards: bool, standby: int = 0, mode: str = "LazyForward", **more: Any
) -> dict[str, Any]:
    elastic, training_more = more.pop("elastic", {}), more.pop("training", {})
    return bamboojob(
        task=more.pop("task", {"entrypoint": "test_sharded_optimizer:build"}),
        training=training(STEPS, 12, 3, maxGradientNorm=1.0, gradientGroups=4, **training_more),
        topology={"stages": 1, "pipelines": pipelines, "shardOptimizer": shards},
        redundancy={"mode": mode, "placement": more.pop("placement", "Device")},
        standby={"workers": standby},
        elastic={"stabilizationSeconds": 0, **elastic},
        **more,
    )


@functools.cache
def whole(**more: Any) -> Job:
    return Job(manifest(2, shards=False, **more)).run()


def check(job: Job, reference: Job) -> None:
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.progress.losses == reference.state.progress.losses
    assert ended_with(job) == ended_with(reference)


def ended_with(job: Job) -> str:
    """The digest of the whole model's state, whoever holds which part of it."""
    plan, found = job.state.plan, {}
    assert plan is not None
    for cell, digest in job.state.ending.finished:
        assert found.setdefault(plan.state_of(cell), digest) == digest
    return add_digests(found.values())


def test_shards_change_no_bit() -> None:
    """Tied parameters, whose layers are in different shards, and a norm that all gradients count for."""
    tied = {"task": gpt_task(dModel=16, context=8, tieEmbeddings=True)}
    plain = Job(manifest(1, shards=False, **tied)).run()
    for pipelines in (3, 4):
        job = Job(manifest(pipelines, shards=True, **tied)).run()
        assert len(job.plan.shards) == pipelines
        check(job, plain)


@pytest.mark.parametrize(
    "more",
    [
        {"training": {"ema": {"decay": 0.9}}},
        {"training": {"precision": "bf16", "parameterPrecision": "bf16"}},
        {"training": {"precision": "fp16", "lossScale": {"initialPower": 32, "growthInterval": 2}}},
        {"training": {"evaluation": {"everySteps": 2, "batches": 4}}},
        {"placement": "Host"},
    ],
    ids=str,
)
def test_what_else_belongs_to_a_step_stays_the_same(more: dict[str, Any]) -> None:
    """Averages of the weights, other numbers, steps that are skipped, evaluations, replicas' state in host memory."""
    plain, job = Job(manifest(2, shards=False, **more)).run(), Job(manifest(4, shards=True, **more)).run()
    check(job, plain)
    assert job.state.progress.evaluations == plain.state.progress.evaluations
    assert job.state.progress.skips == plain.state.progress.skips
    assert bool(plain.state.progress.skips) == ("lossScale" in more.get("training", {}))


def kills(
    job: dict[str, Any], step: int, reference: Job, names: set[str] | None = None, kind: Kind | None = None
) -> dict[Fault, Any]:
    def judge(killed: Job) -> list[str]:
        check(killed, reference)
        return [e.reason for e in killed.emitted]

    return kill_at_each(job, lambda f: f.step == step and (names is None or f.name in names), judge, kind)


@sweep(of_role)
def test_a_kill_at_an_instruction_leaves_the_bits(kind: Kind | None) -> None:
    """Between reduction, update and distribution, too; the other holder of the shard goes on with it."""
    killed = kills(manifest(3, shards=True), 2, whole(), kind=kind)
    assert {f.cell for f in killed} == {Cell(d, 0) for d in range(3)}
    assert {"GatherGradients", "OptimizerStep", "ReplicaUpdate", "TakeParameters"} <= {f.name for f in killed}
    assert not any("Restoring" in reasons for reasons in killed.values())


@pytest.mark.slow
@pytest.mark.parametrize("standby", [0, 1])
def test_a_kill_at_every_instruction_of_four_pipelines(standby: int) -> None:
    killed = kills(manifest(4, shards=True, standby=standby), 2, whole())
    assert {f.cell for f in killed} == {Cell(d, 0) for d in range(4)}


def test_a_lost_worker_is_replaced_by_a_standby_that_held_nothing() -> None:
    job = Job(manifest(3, shards=True, standby=1), (Fault("Backward", Cell(1, 0), 1, 1),)).run()
    check(job, whole())
    plan = job.plan
    assert len({plan.at(c).owner for c in plan.cells()}) == 3
    assert "Healed" in [e.reason for e in job.emitted]


def test_a_worker_with_notice_hands_its_shard_over() -> None:
    def notice(job: Job) -> None:
        if job.state.step == 1 and not job.state.membership.notices:
            job.notice("w1")

    job = Job(manifest(3, shards=True), decide=notice).run()
    check(job, whole())
    assert not job.state.moves.takeovers or all(t.forwards == 0 for t in job.state.moves.takeovers)


@pytest.mark.parametrize(("first", "then"), [(3, 4), (4, 3), (2, 3), (3, 2)])
def test_growing_and_shrinking_deal_the_shards_anew(first: int, then: int) -> None:
    bounds = {"minPipelines": min(first, then), "maxPipelines": max(first, then)}
    document = manifest(min(first, 3), shards=True, elastic={**bounds, "stabilizationSeconds": 0})
    document["spec"]["topology"]["pipelines"] = first
    document["spec"]["training"]["steps"] = 10

    def leave(job: Job) -> None:
        if job.state.step == 2 and then < first:
            job.capacity = then
            job.kill("w0")

    started = first if first < then else 1000
    job = Job(document, decide=leave, capacity=started)

    def grow(grown: Job) -> None:
        leave(grown)
        if grown.state.step == 2 and then > first:
            grown.capacity = then

    job.decide = grow
    job.run()
    plain = manifest(1, shards=False)
    plain["spec"]["training"]["steps"] = 10
    check(job, Job(plain).run())
    assert len(job.plan.pipelines) == then
    assert len(job.plan.shards) == (then if then > 2 else 0)


def test_a_checkpoint_of_shards_is_restored_on_another_grid() -> None:
    """Each holder writes what it holds; who begins with it reads what it is to hold."""
    store = MemoryStore()
    kept = {"checkpoint": {"storage": {"uri": "memory://x"}, "everySteps": 2, "keepInMemory": False}}
    reference = whole()
    lost: list[str] = []

    def lose_all(job: Job) -> None:
        if job.state.step >= 3 and store.committed and not lost:
            lost.extend(job.state.workers)
            for worker in lost:
                job.kill(worker)

    job = Job(manifest(4, shards=True, **kept), decide=lose_all, store=store).run()
    check(job, reference)
    assert "Restored" in [e.reason for e in job.emitted]
    for grid in (1, 3):
        again = MemoryStore()
        again.files, again.committed = dict(store.files), [min(store.committed)]
        gone_on = Job(manifest(grid, shards=True, **kept), store=again).run()
        assert ended_with(gone_on) == ended_with(reference)
        assert min(gone_on.state.progress.losses) == min(store.committed).step


def optimizer_bytes(pipelines: int, shards: bool) -> tuple[list[int], list[int]]:
    """Of each worker's account at the end: parameters, and what the optimizer remembers, replicas' included."""
    job = Job(manifest(pipelines, shards=shards)).run()
    accounts = [
        account(n.inside.states, n.inside.executor, n.inside.redundant, n.inside.outbox.log, Nothing())  # type: ignore[arg-type]
        for n in job.nodes.values()
    ]
    return [a.parameters for a in accounts], [a.optimizer + a.replica for a in accounts]


class Nothing:
    early: tuple[Any, ...] = ()
    copies: tuple[Any, ...] = ()


def test_a_worker_holds_the_optimizers_state_of_two_shards_and_no_parameter_twice() -> None:
    plain, sharded = optimizer_bytes(4, shards=False), optimizer_bytes(4, shards=True)
    assert sum(sharded[1]) < 0.7 * sum(plain[1])
    document = manifest(4, shards=True)
    spec, task = parse_manifest(document), build({})
    _, counted = worker_memory(measure(task, spec), [(0, 5)], spec, taken_over=False)
    buffers = 2 * 40  # of the replica's layers, running ones and frozen ones
    assert counted.optimizer + counted.replica == max(sharded[1]) - buffers, "bamboo validate knows it"
    assert max(sharded[0]) < 1.1 * max(plain[0]), "only running buffers are there twice"


def test_sizes_of_layers_count_a_tied_parameter_once() -> None:
    job = Job(manifest(3, shards=True, task=gpt_task(dModel=16, context=8, tieEmbeddings=True)))
    sizes = trained_sizes(job.task)
    assert len(sizes) == len(job.task.layers)
    stage = build_stage(job.task, 0, ((0, len(sizes)),), TrainingConfig.of(job.spec.training))
    assert sum(sizes) == sum(tensor.numel() for tensor in stage.values.of_layers((0, len(sizes))))


# the whole model


def shards_of(config: TrainingConfig) -> tuple[WholeModel, dict[int, StageValues]]:
    ranges = ((0, 1), (1, 2), (2, 3))
    task = small_task()
    model = WholeModel(build_stage(task, 0, ((0, 3),), config, remembers=False), ranges)
    return model, {number: StageValues(task, number, ranges, config) for number in range(3)}


def sent(shards: dict[int, StageValues], model: WholeModel, number: int, *, fixed: bool) -> None:
    values = shards[number].of_layers((number, number + 1), fixed=fixed)
    model.take(shards[number].version, number, tuple(t.detach().clone() for t in values), fixed=fixed)


def config() -> TrainingConfig:
    return TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=2, micro_batch_size=2)


def test_the_whole_model_waits_for_every_shard_and_for_what_never_changes() -> None:
    model, shards = shards_of(config())
    mine = {0: shards[0]}
    assert not model.follow(0, mine)
    sent(shards, model, 1, fixed=False)
    sent(shards, model, 2, fixed=False)
    assert set(model.lacks(0, mine)) == {(1, True), (2, True)}
    sent(shards, model, 1, fixed=True)
    sent(shards, model, 2, fixed=True)
    assert model.follow(0, mine)
    assert model.version == 0
    assert model.stage is not None
    assert mine[0].shares
    assert not model.follow(0, mine), "it is there already"


@pytest.mark.parametrize(("shard", "number"), [(1, 2), (0, 2), (7, 0)])
def test_values_of_another_shard_are_refused(shard: int, number: int) -> None:
    model, shards = shards_of(config())
    values = tuple(t[:-1] if t.dim() else t for t in shards[number].of_layers((number, number + 1)))
    with pytest.raises(ValueError, match="shard"):
        model.take(0, shard, values, fixed=False)


def test_a_state_that_replaces_a_shards_leaves_the_whole_model_alone() -> None:
    model, shards = shards_of(config())
    assert model.follow(0, shards)
    before = [t.clone() for t in _parameters(model)]
    shards[0].share(None)
    shards[0].apply(torch.ones(shards[0].final.size), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, _parameters(model), strict=True))


def _parameters(model: WholeModel) -> Iterator[Tensor]:
    assert model.stage is not None
    yield from model.stage.values.of_layers((0, 3))
