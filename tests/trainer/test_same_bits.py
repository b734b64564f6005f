"""A table of jobs that train to equal bits: on any grid, after the loss of a worker, and from a checkpoint.

A row is a task with the features of its training. A column is a grid, or a resumption on another grid.
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_initial import initial_task
from test_sequences import config as sequences
from test_sequences import packed
from test_stage import STOPPING
from test_texts_chats import config as chats

import training_job
from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.events import Interrupted, Outcome
from bamboo_core.planning.plan import ROOT, Cell
from bamboo_core.planning.spot_checks import SpotSchedule
from bamboo_trainer import loss_scale
from bamboo_trainer.loading import load_task
from bamboo_trainer.stage import parameters
from bamboo_trainer.training import TrainingConfig, shown_to_build
from branching_job import BranchingJob, each_way
from manifest_kit import bamboojob, gpt_task, training
from processes import run_with_faults
from reference import train
from training_job import Fault, Job, MemoryStore
from transformers_kit import ENTRYPOINT, config_of

pytest_plugins = ["compiled_fixtures", "transformers_kit"]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's own, when its compiler is imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # of transformers
]
Grid = tuple[int, int]  # stages and pipelines
RESUMED = ("wide", "resumed")  # fast columns of rows whose checkpoints hold more than usual
COMPUTED = ("Forward", "Backward", "BackwardInput", "BackwardWeight")
REDUCTION = ("BackwardRest", "ScatterGradients", "ReduceGradients", "GatherGradients")  # with several pipelines only
PHASES = ("Forward", "Backward", "ReportReady", "OptimizerStep")
NUMBERS = training(4, 8, 2, maxGradientNorm=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A task with the features of its training.

    task: its entrypoint and config, or a function that makes them, given a folder for files. numbers: the manifest's
    training; None: NUMBERS. deep: the stages of the grid with one pipeline. wide: the other grid. kills: the
    instructions before which a worker is killed, each in a job of its own. anywhere: slow tests kill it before and
    after every instruction. steps: the steps of these kills. spec: other fields of the manifest. alone: fields that
    differ in the undisturbed job. plain: losses equal plain PyTorch's. fast: the columns that are not slow.
    """

    task: dict[str, Any] | Callable[[Path], dict[str, Any]]
    numbers: dict[str, Any] | None = None
    deep: int = 3
    wide: Grid = (2, 2)
    kills: tuple[str, ...] = ("Backward", "OptimizerStep")
    anywhere: bool = False
    steps: tuple[int, ...] = (2,)
    spec: dict[str, Any] | None = None
    alone: dict[str, Any] | None = None
    plain: bool = False
    fast: tuple[str, ...] = ("wide",)


def own(build: str, **config: Any) -> dict[str, Any]:
    return {"entrypoint": build, "config": config}


def gpt(**config: Any) -> dict[str, Any]:
    return gpt_task(dModel=16, context=8, **config)


def numbers(steps: int = 4, batch: int = 8, micro: int = 2, **more: Any) -> dict[str, Any]:
    return training(steps, batch, micro, **{"maxGradientNorm": 1.0, **more})


def transformer(make: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"entrypoint": ENTRYPOINT, "config": make(folder)}


def published(build: str, *fast: str) -> Row:
    """Return the row of a published model at size tiny."""
    task = own(build, size="tiny")
    return Row(task=task, numbers=numbers(3), deep=4, steps=(1,), kills=("Forward",), plain=True, fast=fast)


def split(model: str, deep: int, *fast: str) -> Row:
    task = own("plain_models:build", model=model)
    return Row(task=task, numbers=numbers(3), deep=deep, steps=(1,), plain=True, fast=fast)


def shared(sharing: str, *fast: str, precision: str = "fp32", **features: Any) -> Row:
    rounded = {} if precision == "fp32" else {"precision": precision, "parameterPrecision": precision}
    task, numbers = own("sharing_tasks:build", sharing=sharing), training(5, 12, 3, **rounded)
    return Row(task=task, numbers=numbers, deep=4, fast=fast, **features)


def postponed(**features: Any) -> Row:
    """Return a row whose weight gradients are computed later (ZB-H1), with the bits of 1F1B."""
    kills = ("BackwardInput", "BackwardWeight", "ReportReady")
    topology = {"spec": {"topology": {"schedule": "ZBH1"}}, "alone": {"topology": {"schedule": "1F1B"}}}
    return Row(**{"numbers": numbers(4, 12), "wide": (3, 2), "kills": kills, "steps": (3,), **topology, **features})


def compiled(**features: Any) -> Row:
    compiling = numbers(compile=True)
    return Row(**{"task": gpt(blocks=2), "numbers": compiling, "fast": (), **features})


def fp16(**config: Any) -> Row:
    """Return a row in fp16. Gradients overflow in several steps, including step 1, and these steps are skipped."""
    given = {"precision": "fp16", **({"maxGradientNorm": 1.0} if config else {})}
    return Row(
        task=own("test_loss_scale:build", **config),
        numbers=training(10, 4, 2, **given),
        steps=(1,),
        kills=("Backward",) if config else PHASES,
        anywhere=not config,
        fast=() if config else RESUMED,
    )


ROUNDED = {"precision": "bf16", "parameterPrecision": "bf16"}
SOURCE = {"kind": "random", "length": 12, "samples": 9, "padding": True}
MIXTURE = {"kind": "mixture", "sources": [{**SOURCE, "weight": 3}, {**SOURCE, "weight": 1}]}
STOPPED = {"everySteps": 2, **STOPPING}
ROWS: dict[str, Row] = {
    # precision
    "boundaries in bf16": Row(task=gpt(), numbers=numbers(precision="bf16", boundaryPrecision="bf16"), deep=4),
    "parameters in bf16": Row(task=own("precision_kit:build"), numbers=numbers(**ROUNDED), deep=4, fast=RESUMED),
    "parameters in bf16, fused": Row(
        task=own("precision_kit:build", fused=True), numbers=numbers(**ROUNDED), deep=4, fast=()
    ),
    "parameters in bf16 of a tied transformer": Row(
        task={"entrypoint": ENTRYPOINT, "config": config_of("gpt2")}, numbers=numbers(**ROUNDED), fast=()
    ),
    "fp16": fp16(),
    "fp16, both": fp16(balanced=True, weighted=True),
    # steps
    "fused AdamW": Row(
        task=own("test_fused_optimizers:build_open"), deep=4, kills=("OptimizerStep", "ReplicaUpdate"), fast=()
    ),
    "fused groups": Row(
        task=own("test_scheduled_optimizer:fused"),
        numbers=numbers(4, 4),
        deep=4,
        kills=("OptimizerStep", "ReplicaUpdate"),
        fast=RESUMED,
    ),
    "several optimizers": Row(task=own("test_optimizers:build")),
    "scheduled SGD": Row(task=own("test_schedules:build", kind="SGD"), numbers=numbers(5), steps=(3,), fast=()),
    "scheduled AdamW": Row(task=own("test_schedules:build", kind="AdamW"), numbers=numbers(5), steps=(3,), fast=()),
    "loss skipped": Row(
        task=own("test_skipped_steps:build", kind="loss"),
        numbers=numbers(6, 4, nonFinite="Skip"),
        kills=("ReportReady",),
        steps=(1, 2, 3),
        fast=RESUMED,
    ),
    "gradient skipped": Row(
        task=own("test_skipped_steps:build", kind="gradient"),
        numbers=numbers(6, 4, nonFinite="Skip"),
        kills=("ReportReady", "OptimizerStep"),
        steps=(1, 2, 3),
        fast=(),
    ),
    "decisions": Row(
        task=own("test_decisions:build", tied=True),
        numbers=numbers(9, maxGradientNorm=0.1),
        kills=("ReportReady", "OptimizerStep"),
        steps=(2, 6),
        fast=RESUMED,
    ),
    "evaluation": Row(
        task=own("test_stage:build"),
        numbers=numbers(5, evaluation={"everySteps": 2}),
        kills=("Evaluate", "ReportReady"),
        steps=(2, 5),
        fast=(),
    ),
    "evaluation in bf16": Row(
        task=own("test_stage:build"),
        numbers=numbers(5, evaluation={"everySteps": 2}, precision="bf16"),
        kills=("Evaluate",),
        fast=(),
    ),
    "an early stop": Row(
        task=own("test_stage:build"),
        numbers=training(12, 8, 2, evaluation=STOPPED),
        kills=("Evaluate", "ReportReady"),
        steps=(6,),
        fast=RESUMED,
    ),
    # layers
    "frozen layers": Row(task=own("test_frozen_layers:build"), deep=5, fast=RESUMED),
    "unused parameters": Row(
        task=own("test_unused_parameters:build", optimizer="NAdam"),
        numbers=numbers(7, 4, 1),
        deep=4,
        kills=PHASES,
        anywhere=True,
        steps=(3,),
        spec={"redundancy": {"mode": "Replicas", "placement": "Host"}},
        fast=RESUMED,
    ),
    "unused parameters, momentum": Row(
        task=own("test_unused_parameters:build", optimizer="momentum"),
        numbers=numbers(7, 4, 1),
        wide=(2, 4),
        fast=(),
    ),
    "running buffers": Row(
        task=own("running_tasks:build", checkpointed=[1]),
        numbers=training(5, 12, 3),
        deep=4,
        wide=(2, 4),
        kills=PHASES,
        anywhere=True,
        steps=(3,),
        fast=RESUMED,
    ),
    "weighted loss": Row(
        task=own("weighted_tasks:build", checkpointed=[2]),
        deep=4,
        kills=PHASES,
        anywhere=True,
        steps=(3,),
        fast=RESUMED,
    ),
    "gradients in buckets": Row(task=gpt(tieEmbeddings=True), kills=("Backward", *REDUCTION)),
    "gradients in buckets of one stage": Row(task=gpt(), numbers=numbers(batch=12), wide=(1, 3), kills=REDUCTION[:1]),
    "sums sent within the step": Row(
        task=gpt(), numbers=numbers(batch=16), wide=(2, 3), kills=REDUCTION[1:], anywhere=True
    ),
    "mean loss with losses of layers": Row(task=own("weighted_tasks:build", weighted=False), wide=(2, 4), fast=()),
    "made_before": shared("made_before"),
    "cached": shared("cached", "resumed"),
    "left_behind": shared("left_behind", precision="bf16"),
    # not killed: each kill is tried in another process, which cannot build the stages of new replicas
    "made_here_only": shared("made_here_only", "deep", precision="bf16", kills=()),
    "shared and frozen": shared("frozen", "wide", precision="bf16"),
    "recomputation": Row(
        task=gpt(checkpoint=True),
        numbers=numbers(precision="bf16"),
        alone={"task": gpt()},
        fast=("deep",),
    ),
    # schedules, and compiled layers
    "postponed": postponed(task=gpt(tieEmbeddings=True), fast=("deep",)),
    "postponed, recomputed": postponed(task=gpt(checkpoint=True), fast=()),
    "postponed in bf16": postponed(task=gpt(), numbers=numbers(4, 12, precision="bf16"), wide=(2, 2), fast=()),
    "compiled": compiled(),
    "compiled in bf16": compiled(numbers=numbers(compile=True, **ROUNDED)),
    "compiled, postponed": compiled(
        kills=("BackwardInput", "ReportReady"),
        spec={"topology": {"schedule": "ZBH1"}},
    ),
    # models
    "resnet": published("resnet:build", "deep"),
    "gnmt": published("translation:build", "wide"),
    **{model: published(f"bamboo_trainer.models.{model}:build") for model in ("gpt2", "bert", "llama")},
    "a Sequential": split("chain", 4, "deep"),
    "a module with dictionaries": split("dictionaries", 4),
    "a module with BatchNorm": split("normed", 4),
    "a module that is told sizes": split("sizes", 4),
    "encoder and decoder": split("encoded", 2),
    **{
        f"transformers' {family}": Row(
            task={
                "entrypoint": ENTRYPOINT,
                "config": config_of(family, data={"padding": True}, learningRate=1e-3, **more),
            },
            numbers=numbers(3),
            deep=4,
            steps=(1,),
            plain=True,
            fast=(),
        )
        for family, more in {"gpt2": {}, "bert": {}, "mixtral": {"routerAuxLossCoef": 0.1}}.items()
    },
    # data and first values
    "packed chats": Row(task=transformer(lambda folder: chats(folder, packed=True)), numbers=numbers(3, 4), fast=()),
    "packed documents": Row(
        task=transformer(lambda folder: sequences("gpt2", packed(folder), learningRate=1e-3, warmupSteps=10)),
        deep=4,
        fast=("resumed",),
    ),
    "a mixture of data": Row(
        task={"entrypoint": ENTRYPOINT, "config": config_of("gpt2", warmupSteps=10) | {"data": MIXTURE}},
        deep=4,
        fast=(),
    ),
    "first values of another job": Row(
        task=initial_task,
        numbers=numbers(4, 12),
        deep=4,
        kills=("Forward",),
        steps=(0, 2),
        fast=(),
    ),
}


class Table:
    """The manifests of the rows' jobs, and each row's undisturbed job, which is trained once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._tasks: dict[str, dict[str, Any]] = {}
        self._alone: dict[str, Job] = {}

    def document(self, name: str, grid: Grid, **more: Any) -> dict[str, Any]:
        row = ROWS[name]
        if name not in self._tasks:
            self._tasks[name] = row.task(self._folders.mktemp("row")) if callable(row.task) else row.task
        spec = {
            "task": self._tasks[name],
            "training": row.numbers or NUMBERS,
            "redundancy": {"mode": "Replicas"},
            **(row.spec or {}),
            **more,
        }
        spec["topology"] = {"stages": grid[0], "pipelines": grid[1], **spec.get("topology", {})}
        return bamboojob(**spec)

    def alone(self, name: str) -> Job:
        if name not in self._alone:
            self._alone[name] = Job(self.document(name, (1, 1), **(ROWS[name].alone or {}))).run()
        return self._alone[name]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, compiled_cache: None) -> Iterator[Table]:
    """Yield the table. Its jobs have spot checks in every step, fp16 loss scales that fall and grow within a few steps,
    and buckets so small that a small gradient has as many as a large one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_job, "SpotSchedule", partial(SpotSchedule, early=range(100)))
        patch.setattr(loss_scale, "INITIAL", 2.0**18)
        patch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
        patch.setattr(parameters, "BUCKET_BYTES", 4)
        yield Table(tmp_path_factory)


def ended(job: Job) -> dict[str, Any]:
    progress = job.state.progress
    return {
        "bits": job.bits,
        "end": (job.end.reason, job.end.message),
        "metrics": progress.metrics,
        "skips": progress.skips,
        "losses": progress.losses,
        "evaluations": progress.evaluations,
    }


def check_kills(table: Table, name: str, grid: Grid, *, anywhere: bool = False) -> set[str]:
    """Check that neither the grid nor a kill changes the bits. Wide grids lose the root, deep ones stage 1's owner.

    Return the instructions at which a worker was killed, in the row's steps. anywhere: kill before and after every
    instruction of the lost cell (computations: of one microbatch), not only before the row's `kills`.
    """
    row, expected, made = ROWS[name], ended(table.alone(name)), list[BranchingJob]()
    victim, second = (ROOT, 0) if grid[1] > 1 else (Cell(0, 1), 1)

    class Struck(BranchingJob):
        def strikes(self, fault: Fault) -> bool:
            if fault.step not in row.steps or fault.cell != victim:
                return False
            if fault.name in COMPUTED and fault.microbatch != second:
                return False
            if anywhere:
                return self.branch(fault)
            return fault.name in row.kills and not fault.after and self.branch(fault, (fault.name, fault.step))

    def make() -> BranchingJob:
        made.append(Struck(table.document(name, grid)))
        return made[-1]

    def judge(job: Job) -> None:
        assert ended(job) == expected
        assert job.state.membership.preemptions == 1

    struck = each_way(make, judge)
    assert ended(made[0]) == expected
    checked = {fault.cell.stage for fault in made[0].executed if fault.name == "SpotCheck"}
    assert checked == set(range(grid[0])), "a stage was not checked"
    return {fault.name for fault in struck}


def cells(*columns: str, rows: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    """Parametrize a test with rows and columns; mark a case as slow unless its column is in the row's `fast`."""
    return pytest.mark.parametrize(
        ("name", "column"),
        [
            pytest.param(name, column, id=f"{name}-{column}", marks=() if column in row.fast else pytest.mark.slow)
            for name, row in ROWS.items()
            for column in columns
            if rows(row)
        ],
    )


@cells("deep", "wide")
def test_no_grid_and_no_loss_of_a_worker_changes_the_bits(name: str, column: str, table: Table) -> None:
    row = ROWS[name]
    grid = (row.deep, 1) if column == "deep" else row.wide
    # Nobody waits for the gradient of the root's inputs, and one pipeline has nothing to reduce.
    never = {"BackwardInput", "BackwardWeight"} if column == "wide" else set(REDUCTION)
    assert check_kills(table, name, grid) == set(row.kills) - never


@cells("resumed")
def test_a_job_that_goes_on_on_another_grid_has_the_same_bits(name: str, column: str, table: Table) -> None:
    """A job that resumes on another grid after a suspension, and loses a worker in its first step, keeps the bits."""
    row, store, once, expected = ROWS[name], MemoryStore(), list[bool](), ended(table.alone(name))
    kept = {"checkpoint": {"storage": "memory://x", "everySteps": 1000}}

    def suspend(job: Job) -> None:
        if job.state.step >= 1 and not once:
            once.append(True)
            job.inbox.append(Interrupted(reason="Suspended"))

    before = Job(table.document(name, (2, 1), **kept), decide=suspend, store=store).run()
    assert before.outcome is Outcome.INTERRUPTED
    (checkpoint,) = store.committed
    first = checkpoint.step
    fault = Fault("Forward", Cell(0, 1), first, 1)
    after = Job(table.document(name, (row.deep, 1), **kept), (fault,), store=store).run()
    assert after.state.membership.preemptions == 1
    found = ended(after)
    for told in ("losses", "evaluations"):
        expected[told] = {step: value for step, value in expected[told].items() if step in found[told]}
        assert max(found[told], default=0) >= first or not expected[told]
    expected["skips"] = tuple(step for step in expected["skips"] if step >= first)
    assert found == expected


@cells("deep", rows=lambda row: row.plain)
def test_losses_are_those_of_plain_pytorch(name: str, column: str, table: Table) -> None:
    spec, losses = table.alone(name).spec, list(table.alone(name).state.progress.losses.values())
    task = load_task(spec.task.entrypoint, spec.task.config, shown_to_build(spec.training))
    expected, _ = train(task, TrainingConfig.of(spec.training), len(losses))
    torch.testing.assert_close(losses, list(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@cells("deep", "wide", rows=lambda row: row.anywhere)
def test_a_loss_at_any_instruction_changes_no_bit(name: str, column: str, table: Table) -> None:
    grid = (ROWS[name].deep, 1) if column == "deep" else ROWS[name].wide
    check_kills(table, name, grid, anywhere=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("running buffers", "ReduceGradients"),
        ("unused parameters", "ReduceGradients"),
        ("compiled, postponed", "OptimizerStep"),
        ("resnet", "Backward"),
        ("a mixture of data", "Forward"),
    ],
)
def test_processes_train_to_the_same_bits_after_a_kill(
    name: str, instruction: str, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    microbatch = 2 if instruction in COMPUTED else 0  # the first one of the second pipeline, if it is of one
    fault = (instruction, 1, 0, ROWS[name].steps[0], microbatch, signal.SIGKILL)
    job = run_with_faults(table.document(name, (2, 2)), tmp_path, monkeypatch, fault, seconds=300.0)
    assert job.outcome is Outcome.COMPLETE, job.emitted
    assert job.state.membership.preemptions == 1
    digests = {cell.stage: digest for cell, digest in job.state.ending.finished}
    assert add_digests(digests.values()) == ended(table.alone(name))["bits"]
