"""Phases with a loss and an optimizer each: as plain PyTorch loops, with the same bits on any grid, whoever is lost."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_core.control.digests import add_digests
from bamboo_core.planning.plan import Cell
from bamboo_trainer import reference
from bamboo_trainer.commit.step_policy import StepPolicy
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.decisions import frozen_for
from bamboo_trainer.from_module import from_module
from bamboo_trainer.stage.forwarding import split_needs
from bamboo_trainer.stage.state.optimizer_state import AVERAGE
from bamboo_trainer.stage.work import NO_GRADIENT
from bamboo_trainer.task import Parts, Phase, Task, add_loss, phase
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.inspection.sharing import settled
from bamboo_trainer.tasks.phases import TaskInPhase, check_phases, phase_at, phases_of
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig
from branching_job import kill_at_each
from manifest_kit import bamboojob, training
from stage_kit import CONFIG, at, begin, chain, microbatch, one_step, small_task, state_of
from training_job import Fault, Job

Named = Iterable[tuple[str, nn.Parameter]]
UNCLIPPED = replace(CONFIG, max_gradient_norm=None)
STEPS, MICROBATCHES = 7, 4  # two cycles of a GAN and one step
WIDTH = 4


def adam(rate: float) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: torch.optim.Adam([p for _, p in named], lr=rate, betas=(0.5, 0.9), eps=1e-4)


# a GAN


class Made(nn.Module):
    """A layer of a generator; the real points go along in the discriminator's steps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, noise: Tensor, *real: Tensor) -> Parts:
        return (self.inner(noise), *real) if phase() == "judge" else (self.inner(noise),)


class Judge(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *points: Tensor) -> Parts:
        return tuple(self.inner(one) for one in points)


def judge_loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.softplus(outputs[0]).mean() + F.softplus(-outputs[1]).mean()


def maker_loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.softplus(-outputs[0]).mean()


def fooled(outputs: Parts, targets: Parts) -> Tensor:
    return (outputs[0] > 0).float().mean()


def gan(**changes: Any) -> Task:
    points = torch.linspace(-1, 1, 48).reshape(24, 2)
    noise = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    task = Task(
        layers=(
            lambda: Made(nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh())),
            lambda: Made(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))),
            lambda: Judge(nn.Sequential(nn.Linear(2, WIDTH), nn.LeakyReLU(0.2))),
            lambda: Judge(nn.Linear(WIDTH, 1)),
        ),
        loss=maker_loss,
        dataset=TensorDataset((noise, points), (points,)),
        optimizer=adam(0.05),
        learning_rate=lambda step: 0.05 / (1 + step),
        phases=(
            Phase(name="judge", trains=(2, "3.*"), steps=2, loss=judge_loss, metrics={}),
            Phase(
                name="maker",
                trains=(0, 1),
                metrics={"fooled": fooled},
                optimizer=lambda named: torch.optim.RMSprop([p for _, p in named], lr=0.01, eps=1e-2),
                learning_rate=lambda step: 0.02,
            ),
        ),
    )
    return replace(task, **changes)


def build(config: Mapping[str, Any]) -> Task:
    return gan(decisions={"rest": frozen_for(4, "2.*")}) if config.get("decisions") else gan()


def plain_gan(config: TrainingConfig, steps: int) -> dict[str, Tensor]:
    """Two modules, two optimizers, and whose turn it is, as anybody writes it."""
    task = gan()
    layers = [build_layer(task, config.seed, i).inner for i in range(4)]
    maker, judge = nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])
    judging = torch.optim.Adam(judge.parameters(), lr=0.05, betas=(0.5, 0.9), eps=1e-4)
    making = torch.optim.RMSprop(maker.parameters(), lr=0.01, eps=1e-2)
    judged = 0
    for step in range(steps):
        judges = step % 3 < 2
        for optimizer in (judging, making):
            optimizer.zero_grad()
        for m in range(config.microbatches):
            (noise, real), _ = task.dataset.batch(config.samples(step, m, task.dataset))
            if judges:
                loss = F.softplus(judge(maker(noise).detach())).mean() + F.softplus(-judge(real)).mean()
            else:
                loss = F.softplus(-judge(maker(noise))).mean()
            (loss / config.microbatches).backward()
        if judges:
            judging.param_groups[0]["lr"] = 0.05 / (1 + judged)
            judging.step()
            judged += 1
        else:
            making.param_groups[0]["lr"] = 0.02
            making.step()
    return {
        f"layers.{i}.inner.{name}": tensor.detach()
        for i, layer in enumerate(layers)
        for name, tensor in layer.state_dict().items()
    }


SPLITS = ([(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 3), (3, 4)])


@pytest.mark.parametrize("split", SPLITS, ids=len)
def test_a_gan_trains_as_in_a_plain_loop(split: list[tuple[int, int]]) -> None:
    stages = chain(gan(), split, UNCLIPPED)
    for step in range(9):
        one_step(stages, step, UNCLIPPED)
    found, expected = state_of(stages), plain_gan(UNCLIPPED, 9)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_what_a_phase_does_not_train_keeps_its_bits_and_its_optimizer() -> None:
    (stage,) = chain(gan(), SPLITS[0], CONFIG)

    def parts() -> dict[str, Tensor]:
        tensors, meta = stage.values.snapshot()
        return dict(zip(meta["names"], tensors, strict=True))

    seen = [parts()]
    for step in range(4):
        one_step([stage], step)
        seen.append(parts())
    moved = [{name for name in a if not torch.equal(a[name], b[name])} for a, b in pairwise(seen)]
    running = {name for name in seen[0] if name.startswith("constant:")}
    assert {name.partition(":")[2][0] for name in moved[0] - running} == {"2", "3"}
    assert {name.partition(":")[2][0] for name in moved[2] - running} == {"0", "1"}
    assert moved[0] == moved[1] == moved[3]
    assert any("judge/exp_avg" in name for name in moved[0])
    assert any("maker/square_avg" in name for name in moved[2])
    assert running <= moved[2], "forwards of all layers are run in every step"


def test_nothing_goes_back_in_front_of_what_a_phase_trains() -> None:
    stages = chain(gan(), SPLITS[2], CONFIG)
    crossed = microbatch(stages, [begin(stage) for stage in stages], 0, 0)
    assert [split_needs(parts)[1] for parts in crossed[:2] if parts] == [(False, False), (True, True)]
    assert crossed[4] == (NO_GRADIENT, NO_GRADIENT)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        at("bf16"),
        at("fp16"),
        at("bf16", parameter_precision="bf16", gradient_precision="bf16"),
        replace(CONFIG, ema=0.9),
    ],
    ids=["clipped", "bf16", "fp16", "rounded", "averages"],
)
def test_any_precision_and_split_gives_the_numbers_of_plain_pytorch(config: TrainingConfig) -> None:
    task = gan(checkpointed=(1, 2))
    losses, state = reference.train(task, config, STEPS)
    for split in SPLITS[::2]:
        stages = chain(task, split, config)
        assert [one_step(stages, k, config) for k in range(STEPS)] == pytest.approx(losses, rel=1e-5)
        found = {name: t for name, t in state_of(stages).items() if "batches" not in name and "running" not in name}
        for name, tensor in found.items():  # a plain BatchNorm counts steps that are skipped in fp16
            torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)


def test_averages_follow_what_a_step_trains() -> None:
    (stage,) = chain(gan(), SPLITS[0], replace(CONFIG, ema=0.5))

    def averages() -> dict[str, Tensor]:
        found = dict(stage.values.optimizer.named())
        return {name: t.clone() for name, t in found.items() if name.endswith(AVERAGE)}

    before = averages()
    one_step([stage], 0)
    moved = {name.split(":")[1][0] for name, t in averages().items() if not torch.equal(t, before[name])}
    assert moved == {"2", "3"}


# on any grid


def manifest(stages: int, pipelines: int, mode: str = "LazyForward", **more: Any) -> dict[str, Any]:
    return bamboojob(
        task={"entrypoint": "test_phases:build", "config": {"decisions": more.pop("decisions", False)}},
        training=training(
            more.pop("steps", STEPS), 2 * MICROBATCHES, 2, maxGradientNorm=0.5, **more.pop("training", {})
        ),
        topology={"stages": stages, "pipelines": pipelines, **more.pop("topology", {})},
        redundancy={"mode": mode, **more.pop("redundancy", {})},
        elastic={"minStages": stages},
        **more,
    )


def ended(job: Job) -> tuple[Any, ...]:
    assert job.finish is not None
    assert job.finish.reason == "Complete", (job.finish, job.emitted)
    digests = {cell.stage: digest for cell, digest in job.state.ending.finished}
    return job.state.progress.losses, add_digests(digests.values())


@cache
def calm(decisions: bool = False) -> tuple[Any, ...]:
    return ended(Job(manifest(1, 1, decisions=decisions)).run())


GRIDS: Mapping[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "3x1": ((3, 1), {"mode": "EagerForward"}),
    "2x2": ((2, 2), {"mode": "EagerBackward"}),
    "4x1, split backwards": ((4, 1), {"topology": {"schedule": "ZBH1"}}),
}


@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_ends_with_the_same_bits_whoever_is_lost(name: str) -> None:
    (stages, pipelines), more = GRIDS[name]
    assert ended(Job(manifest(stages, pipelines, **more)).run()) == calm()
    last = Cell(pipelines - 1, stages - 1)
    first = "Backward" if "split" not in name else "BackwardInput"
    faults = (Fault(first, last, 1, MICROBATCHES - 1), Fault("ReportReady", Cell(0, 0), 5, after=True))
    job = Job(manifest(stages, pipelines, standby={"workers": 2}, **more), faults).run()
    assert job.state.membership.preemptions == 2
    assert ended(job) == calm()


def killed(stages: int, pipelines: int, kill: Callable[[Fault], bool]) -> set[str]:
    """The instructions of pipeline 0 in steps of both phases at which a worker was killed, to no effect."""
    expected = calm()

    def judge(job: Job) -> None:
        assert ended(job) == expected

    struck = kill_at_each(
        manifest(stages, pipelines), lambda f: f.step in (1, 2) and not f.cell.pipeline and kill(f), judge
    )
    return {fault.name for fault in struck}


@pytest.mark.slow
def test_a_kill_at_the_end_of_either_phase_changes_nothing() -> None:
    names = {"Backward", "ReportReady", "OptimizerStep"}
    assert (
        killed(2, 1, lambda fault: fault.name in names and fault.microbatch == 3 * (fault.name == "Backward")) == names
    )


@pytest.mark.slow
def test_a_kill_at_each_instruction_of_steps_of_both_phases_changes_nothing() -> None:
    assert {"Forward", "Backward", "OptimizerStep", "ReportReady", "ReplicaUpdate"} <= killed(2, 2, lambda fault: True)


@pytest.mark.parametrize("first", [2, 3])
def test_a_job_goes_on_between_two_phases_on_another_grid(first: int) -> None:
    checkpoint = {"storage": {"uri": "memory://store"}, "everySteps": 100}
    store = Job(manifest(2, 1, steps=first, checkpoint=checkpoint)).run().store
    assert [one.step for one in store.committed] == [first]
    losses, digest = ended(Job(manifest(4, 1, checkpoint=checkpoint), store=store).run())
    assert digest == calm()[1]
    assert losses.items() <= calm()[0].items()


def test_decisions_and_phases_go_together() -> None:
    expected = calm(decisions=True)
    assert expected != calm()
    assert ended(Job(manifest(2, 2, decisions=True), (Fault("Backward", Cell(0, 1), 2, 1),)).run()) == expected


def test_a_steps_loss_is_told_under_its_phases_name() -> None:
    seen: dict[int, Mapping[str, float]] = {}
    job = Job(manifest(2, 1), decide=lambda job: seen.update({job.state.step: job.state.progress.metrics})).run()
    losses = job.state.progress.losses
    assert [sorted(seen[step]) for step in range(1, 5)] == [
        ["judge_loss"],
        ["judge_loss"],
        ["fooled", "maker_loss"],
        ["judge_loss"],
    ]
    assert (seen[2]["judge_loss"], seen[3]["maker_loss"]) == (losses[1], losses[2])
    policy = StepPolicy(loss_names=("judge_loss",))
    assert policy.with_loss(0, 0.5, {"judge_loss": 2.0}) == {"judge_loss": 2.0}, "the task's own metric counts"


# an actor and a critic: a body that both train, each by an optimizer of its own


def critic_loss(outputs: Parts, targets: Parts) -> Tensor:
    return (outputs[0][:, -1] - targets[0]).square().mean()


def actor_loss(outputs: Parts, targets: Parts) -> Tensor:
    advantage = targets[0] - outputs[0][:, -1].detach()
    return -(outputs[0][:, :-1].log_softmax(-1)[:, 0] * advantage).mean()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([self.actor(hidden), self.critic(hidden)], 1)


def two_heads() -> Task:
    states = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
    return small_task(
        layers=(lambda: nn.Linear(3, WIDTH), nn.Tanh, Heads),
        dataset=TensorDataset((states,), (states.sum(1),)),
        optimizer=adam(0.02),
        learning_rate=lambda step: 0.02,
        phases=(
            Phase(name="critic", trains=(0, "2.critic.*"), loss=critic_loss),
            Phase(name="actor", trains=(0, "2.actor.*"), loss=actor_loss, optimizer=adam(0.02)),
        ),
    )


@pytest.mark.parametrize("split", [[(0, 3)], [(0, 1), (1, 3)]], ids=len)
def test_two_optimizers_of_one_body_remember_it_apart(split: list[tuple[int, int]]) -> None:
    task = two_heads()
    model = nn.Sequential(*(build_layer(task, CONFIG.seed, i) for i in range(3)))
    heads, body = model[2], model[0]
    optimizers = [
        adam(0.02)([*body.named_parameters(), *head.named_parameters()]) for head in (heads.critic, heads.actor)
    ]
    stages = chain(task, split, UNCLIPPED)
    for step in range(6):
        model.zero_grad()
        for m in range(CONFIG.microbatches):
            inputs, targets = task.dataset.batch(CONFIG.samples(step, m, task.dataset))
            loss = (critic_loss, actor_loss)[step % 2]((model(*inputs),), targets)
            (loss / CONFIG.microbatches).backward()
        optimizers[step % 2].step()
        one_step(stages, step, UNCLIPPED)
    found = state_of(stages)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found[f"layers.{name}"], tensor.detach(), rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(2 * x if phase() == "critic" else x).tanh()


class Module(nn.Module):
    """The same as one module. between: it asks for the phase between its blocks."""

    def __init__(self, *, between: bool = False) -> None:
        super().__init__()
        self.blocks, self._between = nn.ModuleList(Block() for _ in range(2)), between
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Mapping[str, Tensor]:
        x = 2 * x if self._between and phase() == "critic" else x
        for block in self.blocks:
            x = block(x)
        return {"policy": self.actor(x), "value": self.critic(x)[:, 0]}


def test_a_module_that_is_split_has_phases() -> None:
    def value(outputs: Mapping[str, Tensor], wanted: Tensor) -> Tensor:
        return (outputs["value"] - wanted).square().mean()

    def policy(outputs: Mapping[str, Tensor], wanted: Tensor) -> Tensor:
        return -(outputs["policy"].log_softmax(-1)[:, 0] * (wanted - outputs["value"].detach())).mean()

    task = from_module(
        Module,
        loss=value,
        dataset=two_heads().dataset,
        optimizer=adam(0.02),
        learning_rate=0.02,
        phases=(
            Phase(name="critic", trains=("*.blocks.*", "*.critic.*")),
            Phase(name="actor", trains=("*.actor.*",), loss=policy, metrics={"value": value}),
        ),
    )
    model, optimizers = Module(), list[torch.optim.Optimizer]()
    layers = (build_layer(task, CONFIG.seed, i) for i in range(len(task.layers)))
    model.load_state_dict({n.partition(".")[2]: p for layer in layers for n, p in layer.state_dict().items()})
    for other in ("actor", "critic"):
        optimizers.append(adam(0.02)([(n, p) for n, p in model.named_parameters() if n.split(".")[0] != other]))
    stages = chain(task, [(0, 1), (1, len(task.layers))], UNCLIPPED)
    for step, (name, loss) in enumerate(2 * (("critic", value), ("actor", policy))):
        model.zero_grad()
        model.blocks.requires_grad_(name == "critic")
        for m in range(CONFIG.microbatches):
            (given,), (wanted,) = task.dataset.batch(CONFIG.samples(step, m, task.dataset))
            with TaskInPhase(task, name).told():
                (loss(model(given), wanted) / CONFIG.microbatches).backward()
        optimizers[step % 2].step()
        one_step(stages, step, UNCLIPPED)
    found = {name.partition(".module.")[2]: tensor for name, tensor in state_of(stages).items()}
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-5, atol=1e-6)


def test_a_module_that_asks_for_the_phase_between_its_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"asks for the phase between them, .*: let a block ask for it, or the loss"):
        from_module(lambda: Module(between=True), loss=critic_loss, dataset=two_heads().dataset, optimizer=adam(0.02))


# distillation: a frozen teacher in the same layers


class Pair(nn.Module):
    """A layer of a teacher beside the student's."""

    def __init__(self, make: Callable[[], nn.Module], narrow: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.teacher, self.student = make().requires_grad_(False), narrow()

    def forward(self, *given: Tensor) -> Parts:
        taught, own = given if len(given) == 2 else given * 2
        return self.teacher(taught), self.student(own)


def distilled(outputs: Parts, targets: Parts) -> Tensor:
    """A sum of two losses: of the labels, and of what the teacher says."""
    teacher, student = outputs
    soft = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean")
    return F.cross_entropy(student, targets[0]) + 4 * soft


def test_a_student_learns_of_a_frozen_teacher_as_in_a_plain_loop() -> None:
    points = torch.randn(24, 3, generator=torch.Generator().manual_seed(3))
    task = small_task(
        layers=(
            lambda: Pair(lambda: nn.Linear(3, 8), lambda: nn.Linear(3, WIDTH)),
            lambda: Pair(nn.Tanh, nn.Tanh),
            lambda: Pair(lambda: nn.Linear(8, 3), lambda: nn.Linear(WIDTH, 3)),
        ),
        loss=distilled,
        dataset=TensorDataset((points,), (torch.arange(24) % 3,)),
        optimizer=adam(0.02),
        learning_rate=lambda step: 0.02,
    )
    layers = [build_layer(task, CONFIG.seed, i) for i in range(3)]
    teacher, student = (nn.Sequential(*(getattr(one, name) for one in layers)) for name in ("teacher", "student"))
    optimizer = adam(0.02)(student.named_parameters())
    stages = chain(task, [(0, 1), (1, 2), (2, 3)], UNCLIPPED)
    for step in range(4):
        optimizer.zero_grad()
        for m in range(CONFIG.microbatches):
            (given,), targets = task.dataset.batch(CONFIG.samples(step, m, task.dataset))
            (distilled((teacher(given), student(given)), targets) / CONFIG.microbatches).backward()
        optimizer.step()
        one_step(stages, step, UNCLIPPED)
    found = state_of(stages)
    for name, tensor in student.named_parameters():
        index, _, rest = name.partition(".")
        torch.testing.assert_close(found[f"layers.{index}.student.{rest}"], tensor.detach(), rtol=1e-5, atol=1e-6)


# whose turn it is


def test_a_step_belongs_to_a_phase_by_its_number() -> None:
    phases = phases_of(gan())
    assert [phase_at(phases, step).name for step in range(5)] == ["judge", "judge", "maker", "judge", "judge"]
    assert [one.own(6) for one in phases] == [4, 2]
    for one in phases:
        assert [one.own(step) for step in range(40)] == [sum(map(one.has, range(step))) for step in range(40)]
    (alone,) = phases_of(small_task())
    assert [(alone.has(step), alone.own(step)) for step in (0, 9)] == [(True, 0), (True, 9)]
    assert (alone.name, alone.trains("7.x"), phase()) == ("", True, "")


def test_patterns_and_numbers_of_layers_say_what_is_trained() -> None:
    one = TaskInPhase(small_task(), patterns=("1.*", "*.bias"))
    names = ["1.weight", "11.weight", "0.bias", "0.inner.bias", "0.weight"]
    assert [one.trains(name) for name in names] == [True, False, True, True, False]


@pytest.mark.parametrize("split", [[(0, 3)], [(0, 1), (1, 3)]], ids=len)
def test_a_tied_parameter_is_trained_by_any_of_its_names(split: list[tuple[int, int]]) -> None:
    task = small_task(
        layers=(lambda: nn.Linear(2, 3), nn.Tanh, lambda: nn.Linear(3, 3)),
        loss=lambda outputs, targets: outputs[0].square().mean(),
        tied=(("0.bias", "2.bias"),),
        phases=(Phase(name="last", trains=(2,)),),
    )
    losses, expected = reference.train(task, CONFIG, 2)
    stages = chain(task, split, CONFIG)
    before = state_of(stages)
    assert [one_step(stages, step) for step in range(2)] == pytest.approx(losses, rel=1e-6)
    found = state_of(stages)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    still = {name for name in before if torch.equal(before[name], found[name])}
    assert still == {"layers.0.weight"}


def test_costs_are_the_mean_over_the_steps() -> None:
    task = gan()
    mixed, of_judge, of_maker = (layer_costs(replace(task, phases=p), 4) for p in (task.phases, *zip(task.phases)))
    assert mixed == pytest.approx([(2 * a + b) / 3 for a, b in zip(of_judge, of_maker, strict=True)])
    assert of_judge[0] < of_maker[0], "no backward of the generator in the discriminator's steps"


ONE = Phase(name="one", trains=(0,))


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ({"one": ONE}, "Task.phases: expected a sequence of bamboo_trainer.task.Phase, got dict"),
        ([ONE, "two"], "expected a sequence of bamboo_trainer.task.Phase, got list"),
        ([ONE, ONE], "Task.phases: two are called 'one', expected names that differ"),
        ([replace(ONE, name="a-b")], "Task.phases: a name must be up to 64 letters, digits and underscores, got 'a-b'"),
        ([replace(ONE, steps=0)], r"Task.phases\['one'\].steps: expected a number of at least 1, got 0"),
        ([replace(ONE, steps=10_001)], "they have 10001 steps together, at most 10000 are accepted"),
        (
            [replace(ONE, trains="0.*")],
            r"\['one'\].trains: expected numbers of layers, or names or patterns",
        ),
        ([replace(ONE, trains=())], r"trains: expected numbers of layers, .* got \(\)"),
        ([replace(ONE, trains=(1.5,))], "got 1.5 in it"),
        ([replace(ONE, trains=(3,))], r"Task.phases\['one'\].trains: 3 is none of the layers 0 to 2"),
        ([replace(ONE, loss=0.5)], r"Task.phases\['one'\].loss: expected a function, got float"),
        ([replace(ONE, metrics=[fooled])], "Task.metrics: expected functions by name, got list"),
        ([replace(ONE, name=f"n{n}") for n in range(17)], "17 phases, at most 16 are accepted"),
    ],
)
def test_phases_that_are_none_are_refused(phases: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        check_phases(small_task(phases=phases))


@pytest.mark.parametrize(
    ("trains", "fits"), [((0, 1), True), ((1,), False), (("2.weight", "1.*"), False), (("2.weight", 1), True)]
)
def test_what_no_trained_parameter_fits_is_refused_before_the_first_step(trains: Any, fits: bool) -> None:
    """Layer 1 has none, and may be named by its number among others."""
    task = small_task(phases=(ONE, Phase(name="two", trains=trains)))
    if fits:
        assert settled(task, 0) is task
        return
    with pytest.raises(
        TaskError, match=r"Task.phases\['two'\].trains: expected trained .* none of this task's fits '1\.\*'"
    ):
        settled(task, 0)


def test_what_is_wrong_in_a_phase_is_told_with_its_name() -> None:
    broken = replace(ONE, learning_rate=lambda step: math.nan)
    (stage,) = chain(small_task(phases=(broken,)), [(0, 3)], CONFIG)
    with pytest.raises(TaskError, match=r"task.phases\['one'\].learning_rate\(0\) returned nan"):
        stage.values.allow_commit()


# a penalty on gradients, within one layer


class Penalized(nn.Module):
    """A critic that lies in one layer, so that its gradients' gradients are its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        add_loss(10 * penalty(self.inner, x), "penalty")
        return self.inner(x)


def penalty(critic: nn.Module, x: Tensor) -> Tensor:
    points = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def test_a_penalty_on_the_gradients_of_one_layer_is_a_loss_of_its_own() -> None:
    task = small_task(
        layers=(lambda: nn.Linear(2, 2), Penalized),
        loss=lambda outputs, _: outputs[0].mean(),
        optimizer=adam(0.02),
        learning_rate=lambda step: 0.02,
    )
    first, critic = (build_layer(task, CONFIG.seed, i) for i in range(2))
    optimizer = adam(0.02)([*first.named_parameters(), *critic.named_parameters()])
    stages = chain(task, [(0, 1), (1, 2)], UNCLIPPED)
    for step in range(3):
        optimizer.zero_grad()
        for m in range(CONFIG.microbatches):
            (given,), _ = task.dataset.batch(CONFIG.samples(step, m, task.dataset))
            hidden = first(given)
            loss = critic.inner(hidden).mean() + 10 * penalty(critic.inner, hidden)
            (loss / CONFIG.microbatches).backward()
        optimizer.step()
        one_step(stages, step, UNCLIPPED)
    found = state_of(stages)
    for index, layer in enumerate((first, critic)):
        for name, tensor in layer.named_parameters():
            torch.testing.assert_close(found[f"layers.{index}.{name}"], tensor.detach(), rtol=1e-5, atol=1e-6)
