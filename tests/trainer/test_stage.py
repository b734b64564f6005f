"""A stage's training compared with plain PyTorch, and evaluation: metrics, early stops, and the best state."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.job_status import status
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Evaluation, Parts, Task
from bamboo_trainer.tasks.evaluation import evaluation_schedule
from bamboo_trainer.tasks.inspection import layer_costs
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from manifest_kit import bamboojob, problems, training
from stage_kit import CONFIG, ROUNDED, SPLITS, at, begin, chain, microbatch, one_step, small_gpt, small_task, state_of
from stage_task_kit import Any as StageAny
from stage_task_kit import Counting, Defaults, One, Pairs, Several
from training_job import Job, MemoryStore

STEPS = 5


SAMPLES = 9  # five batches, the last of one sample


class Block(nn.Module):
    """A layer with dropout, and with a part that its author keeps in eval mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout, self.quiet = nn.Linear(2, width), nn.Dropout(0.5), nn.Dropout(0.5)
        self.quiet.eval()
        self.norm = nn.BatchNorm1d(width)  # evaluations use its running statistics after the step

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.quiet(self.dropout(torch.tanh(self.norm(self.linear(x)))))
        return out


def close(outputs: Parts, targets: Parts) -> tuple[Tensor, int]:
    """Return the sum and the weight of a metric whose weight is not the number of samples."""
    near = (outputs[0] - targets[0]).abs() < 0.3
    return near.sum(), near.numel()


def largest(outputs: Parts, targets: Parts) -> Tensor:
    return outputs[0].max()


def still(outputs: Parts, targets: Parts) -> Tensor:
    """Return 1, as a metric that never improves."""
    return torch.ones(())


def build(config: Mapping[str, Any]) -> Task:
    points = torch.linspace(-1, 1, 2 * SAMPLES).reshape(SAMPLES, 2)
    return small_task(
        layers=(lambda: Block(3), lambda: nn.Linear(3, 2), lambda: Block(2)),
        learning_rate=lambda step: 0.5,
        evaluation=Evaluation(
            dataset=TensorDataset((points,), (points.flip(1),)),
            metrics={"close": close, "largest": largest, "still": still},
        ),
    )


def manifest(stages: int, pipelines: int, every: int = 2, **more: Any) -> dict[str, Any]:
    training_more = {"precision": more.pop("precision", "fp32")}
    return bamboojob(
        task={"entrypoint": "test_stage:build"},
        training=training(STEPS, 8, 2, evaluation={"everySteps": every, **more.pop("evaluation", {})}, **training_more),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": more.pop("mode", "Replicas")},
        **more,
    )


def plainly(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Evaluate a model with these weights in plain PyTorch: `model.eval()`, `torch.no_grad()`. Return its metrics."""
    task = build({})
    model = nn.Sequential(*(build_layer(task, 0, index) for index in range(3)))
    model.load_state_dict({name.removeprefix("layers."): tensor for name, tensor in weights.items()})
    model.eval()
    assert task.evaluation is not None
    inputs, targets = task.evaluation.dataset.batch(range(SAMPLES))
    with torch.no_grad():
        outputs = (model(inputs[0]),)
        batches = [range(first, min(first + 2, SAMPLES)) for first in range(0, SAMPLES, 2)]
        highest = sum(float(outputs[0][list(b)].max()) * len(b) for b in batches) / SAMPLES
        right, of = close(outputs, targets)
        return {
            "loss": float(task.loss(outputs, targets)),
            "close": float(right) / of,
            "largest": highest,
            "still": 1.0,
        }


def test_the_metrics_are_those_of_plain_pytorch() -> None:
    job = Job(manifest(2, 2)).run()
    assert list(job.state.progress.evaluations) == [2, 4, STEPS]
    assert job.state.progress.evaluations[STEPS] == pytest.approx(plainly(job.weights), rel=1e-5)
    told = [emit.message for emit in job.emitted if emit.reason == "Evaluated"]
    assert [text.partition(":")[0] for text in told] == ["after step 2", "after step 4", f"after step {STEPS}"]


def test_evaluation_changes_nothing_of_the_training() -> None:
    with_it = Job(manifest(3, 1, every=1)).run()
    document = manifest(3, 1)
    del document["spec"]["training"]["evaluation"]
    without = Job(document).run()
    assert (with_it.state.progress.losses, with_it.digests) == (without.state.progress.losses, without.digests)


def test_a_shorter_job_ends_with_what_a_longer_one_measures_on_its_way() -> None:
    """A job's evaluation after its last step equals a longer job's evaluation of that state before its next step."""
    longer = Job(manifest(2, 1, every=1)).run()
    document = manifest(2, 1, every=100)
    document["spec"]["training"]["steps"] = 3
    shorter = Job(document).run()
    assert shorter.state.progress.evaluations == {3: longer.state.progress.evaluations[3]}


def test_modules_are_again_in_the_mode_in_which_they_were() -> None:
    stage = build_stage(build({}), 0, [(0, 3)], CONFIG)
    before = [module.training for layer in stage.values.layers.values() for module in layer.modules()]
    assert {True, False} == set(before)
    work = begin(stage)
    assert stage.evaluate(work, 4, None) == ()
    assert work.evaluated[4]["loss"][1] == 1.0, "the last batch has one sample"
    assert work.evaluated[4]["close"][1] == 2.0
    assert [module.training for layer in stage.values.layers.values() for module in layer.modules()] == before
    assert all(p.grad is None or not p.grad.any() for layer in stage.values.layers.values() for p in layer.parameters())


def test_only_so_many_batches_as_wanted() -> None:
    task, document = build({}), manifest(1, 1, evaluation={"batches": 3})
    schedule = evaluation_schedule(task, parse_manifest(document).training)
    assert schedule is not None
    assert [schedule.batches_of(version) for version in range(STEPS + 1)] == [0, 0, 3, 0, 3, 3]
    document["spec"]["training"]["evaluation"]["batches"] = 300
    assert evaluation_schedule(task, parse_manifest(document).training).batches == 5  # type: ignore[union-attr]


def evaluated(**changes: Any) -> Task:
    task = build({})
    assert task.evaluation is not None
    return replace(task, evaluation=replace(task.evaluation, **changes))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (small_task(), "training.evaluation is set, but the task has no `evaluation`"),
        (evaluated(metrics=[close]), "evaluation.metrics must be a mapping"),
        (evaluated(metrics={"loss": close}), 'none of them "loss"'),
        (evaluated(dataset=TensorDataset((torch.ones(0, 2),), (torch.ones(0, 2),))), "the dataset is empty"),
    ],
)
def test_what_cannot_be_evaluated_is_told_when_the_task_is_loaded(task: Task, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        evaluation_schedule(task, parse_manifest(manifest(1, 1)).training)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda outputs, targets: outputs[0], r"metric 'it' returned a tensor \[2, 2\], expected one number"),
        (lambda outputs, targets: "good", "metric 'it' returned str, expected one number"),
        (lambda outputs, targets: (1.0, -1.0), "metric 'it': the weight must be a finite number of at least 0"),
        (lambda outputs, targets: outputs[7], r"evaluation.metrics\['it'\] raised IndexError"),
    ],
)
def test_a_wrong_metric_is_told_by_name(metric: Any, message: str) -> None:
    stage = build_stage(evaluated(metrics={"it": metric}), 0, [(0, 3)], CONFIG)
    with pytest.raises(TaskError, match=message):
        stage.evaluate(begin(stage), 0, None)


def with_checkpoints(steps: int = 12, every: int = 100, **more: Any) -> dict[str, Any]:
    evaluation = {"batches": 2, **more.pop("evaluation", {})}
    checkpoint = {"storage": "memory://store", "everySteps": every, **more}
    document = manifest(2, 1, every=2, checkpoint=checkpoint, evaluation=evaluation)
    document["spec"]["training"]["steps"] = steps
    return document


STOPPING = {"metric": "still", "patience": 2, "batches": 2}  # the first is the best
WHY = "2 evaluations without a better still; the best state is that after step 2"
STOPPED = f"{WHY}; the last one is that after 6 of 12 steps"


def stopping(stages: int, pipelines: int, steps: int = 12, **more: Any) -> dict[str, Any]:
    document = manifest(stages, pipelines, evaluation=STOPPING, **more)
    document["spec"]["training"]["steps"] = steps
    return document


@cache
def six_steps() -> tuple[Any, ...]:
    """Run a job of six steps on two stages. Return its results as `ended` does."""
    document = manifest(2, 1, evaluation={"batches": 2})
    document["spec"]["training"]["steps"] = 6
    return ended(Job(document).run())


def ended(job: Job) -> tuple[Any, ...]:
    """Return the committed steps' losses, the last state's digest, and the evaluations."""
    return job.state.progress.losses, job.bits, job.state.progress.evaluations


def check_stopped(job: Job, expected: tuple[Any, ...]) -> None:
    assert (job.end.reason, job.end.message) == ("EarlyStopped", STOPPED)
    told = status(job.state, 0.0)
    assert (told.step, told.steps, told.stopped_early, told.eta_seconds) == (6, 12, WHY, 0.0)
    assert ended(job) == expected


def test_an_early_stop_ends_a_job_with_the_state_that_was_evaluated_last() -> None:
    """A job that stops early after six steps ends with the state evaluated last, as a job of only six steps does."""
    check_stopped(Job(stopping(2, 2)).run(), six_steps())


def test_evaluated_states_are_kept_with_their_scores() -> None:
    job = Job(with_checkpoints(steps=8, every=3, keepBest=True, evaluation={"metric": "close", "goal": "Max"})).run()
    assert job.end.reason == "Complete"
    scores = {one.step: score for one, score in job.store.scores.items()}
    expected = {step: found["close"] for step, found in job.state.progress.evaluations.items()}
    assert expected.keys() == {2, 4, 6, 8}
    assert scores.items() >= expected.items(), "each that is evaluated is kept, once it is known how good it is"
    assert scores.keys() - expected.keys() <= {3}
    assert all(scores[step] is None for step in scores.keys() - expected.keys())


def test_the_best_state_needs_evaluations() -> None:
    document = with_checkpoints(keepBest=True)
    del document["spec"]["training"]["evaluation"]
    assert problems(document) == ["spec.checkpoint.keepBest: expected only with spec.training.evaluation, got true"]
    document = with_checkpoints(evaluation={"metric": "rihgt"})
    with pytest.raises(TaskError, match="metric is 'rihgt', expected one of loss, close, largest, still"):
        evaluation_schedule(build({}), parse_manifest(document).training)


def test_a_job_that_goes_back_again_to_its_last_step_ends() -> None:
    """A job begins with a complete run's last checkpoint and loses its only worker; it ends with that run's sums."""
    document, store = with_checkpoints(steps=4, every=2), MemoryStore()
    document["spec"]["topology"] = {"stages": 1, "pipelines": 1}
    calm = Job(document, store=store).run()

    def lose_the_first(job: Job) -> None:
        first = job.nodes.get("w0")
        if first is not None and first.alive and job.state.plan is not None and job.state.phase == "Running":
            job.kill("w0")

    again = Job(document, decide=lose_the_first, store=store).run(20_000)
    assert again.end.outcome is Outcome.COMPLETE
    assert "Restoring" in [one.reason for one in again.emitted]
    assert again.state.ending.finished == calm.state.ending.finished


FORMS = {  # and a tolerance for tied parameters, whose gradient is summed layer by layer
    "fp32": (at("fp32"), 2e-5),
    "bf16": (at("bf16"), 2e-3),
    "fp16": (at("fp16"), 2e-3),
    "boundaries in bf16": (at("bf16", boundary_precision="bf16"), 2e-2),
    "parameters in bf16": (ROUNDED, 2e-2),
}


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_stages_trains_like_plain_pytorch(tmp_path, stages, tied, form):
    """Stages have the bits of plain PyTorch, or differ from it by rounding if parameters are tied."""
    config, tolerance = replace(FORMS[form][0], max_gradient_norm=None), FORMS[form][1]
    task = small_gpt(tmp_path, dropout=0.1, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=2, steps=6)
    losses, state = reference.train(task, config, 6)
    parts = chain(task, SPLITS[stages], config)
    if tied:
        assert [one_step(parts, k, config) for k in range(6)] == pytest.approx(losses, rel=tolerance)
        torch.testing.assert_close(state_of(parts), state, rtol=tolerance, atol=tolerance)
    else:
        assert [one_step(parts, k, config) for k in range(6)] == losses
        torch.testing.assert_close(state_of(parts), state, rtol=0, atol=0)
    assert losses[-1] < losses[0]
    exact = replace(config, boundary_precision="fp32", parameter_precision="fp32")
    assert (reference.train(task, exact, 6)[0] == losses) is (config == exact)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_clipping_uses_the_norm_over_all_stages(tmp_path, stages, tied):
    """Clipping agrees with PyTorch's but for the last bits, since our norm is summed in fp64 and PyTorch's in fp32."""
    task = small_gpt(tmp_path, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=0)
    task = replace(task, optimizer=lambda named: torch.optim.SGD(named, momentum=0.9))
    losses, state = reference.train(task, CONFIG, 6)
    parts = chain(task, SPLITS[stages])
    assert [one_step(parts, k) for k in range(6)] == pytest.approx(losses, rel=2e-5)
    torch.testing.assert_close(state_of(parts), state, rtol=2e-5, atol=1e-6)
    unclipped, _ = reference.train(task, replace(CONFIG, max_gradient_norm=None), 6)
    assert unclipped != pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("checkpointed", [(), range(5)])
@pytest.mark.parametrize("split", [[(0, 5)], [(0, 1), (1, 3), (3, 5)]])
def test_a_tuple_is_unpacked_for_a_layer_that_takes_several_arguments(split, checkpointed):
    task = small_task(layers=(Pairs, Several, Defaults, StageAny, One), checkpointed=checkpointed)
    losses, state = reference.train(task, CONFIG, 3)
    stages = chain(task, split)
    assert [one_step(stages, k) for k in range(3)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)
    assert len(layer_costs(task, 2)) == 5


class Reads(TorchDispatchMode):
    """A dispatch mode that counts reads of a tensor's value, each of which waits for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_loss_is_read_when_it_is_asked_for_and_not_before():
    stage = build_stage(small_task(), 0, [(0, 3)], CONFIG)
    work = begin(stage, 0, 1)
    stage.forward(work, 0, 0, None)  # the first one of all is looked at
    with Reads() as reads:
        stage.forward(work, 0, 1, None)
        stage.backward(work, 0, 0, None)
        stage.backward(work, 0, 1, None)
        assert (reads.count, work.losses) == (0, {})
        work.read(work.figures())
        assert reads.count == 2
    assert sorted(work.losses) == [0, 1]
    assert work.figures() == ()


class Sharing(nn.Linear):
    """A linear layer that also returns its weight, as models tied by hand do, a view of it, and a part of a buffer."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("table", torch.arange(4))

    def forward(self, x):
        return super().forward(x), self.weight, self.weight[1:].T, self.table[:2]


class Shared(nn.Module):
    def forward(self, parts):
        return parts[0] @ parts[1] + parts[2].T + parts[3]


def test_what_was_sent_stays_as_it_was_when_it_was_a_parameter():
    stages = chain(small_task(layers=(Sharing, Shared)), [(0, 1), (1, 2)])
    work = begin(stages[0])
    sent = stages[0].forward(work, 0, 0, None)
    before = [p.clone() for p in sent]
    one_step(stages, 0)
    assert all(torch.equal(a, b) for a, b in zip(sent, before, strict=True))
    assert not torch.equal(state_of(stages[:1])["layers.0.weight"], before[1])
    losses, state = reference.train(small_task(layers=(Sharing, Shared)), CONFIG, 4)
    stages = chain(small_task(layers=(Sharing, Shared)), [(0, 1), (1, 2)])
    assert [one_step(stages, k) for k in range(4)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("split", "reads"), [([(0, 3)], 1), ([(0, 1), (1, 3)], 2)], ids=str)
def test_each_end_of_the_pipeline_reads_a_microbatch_once(split, reads):
    points = torch.arange(24.0).reshape(12, 2)
    data = Counting((points,), (points,))
    stages = chain(small_task(dataset=data), split)
    works = [begin(s) for s in stages]
    microbatch(stages, works, 0, 0)
    assert data.calls == reads
    microbatch(stages, works, 0, 1)
    assert data.calls == 2 * reads
