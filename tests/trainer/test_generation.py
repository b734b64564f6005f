"""Generation: the texts of plain PyTorch, on any grid, and whoever is lost in the middle of one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bamboo_core.history.records import MOST_TEXT, Continuation
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import Cell
from bamboo_trainer.loading import load_task
from bamboo_trainer.measurements import try_measurements
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Dataset, Evaluation, Parts, Task, TextGeneration
from bamboo_trainer.tasks.generation import chosen, continuation, first_tokens, generation_schedule
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer, run_layer
from branching_job import BranchingJob, each_way
from manifest_kit import bamboojob, training
from stage_kit import CONFIG, begin, small_task
from training_job import Fault, Job, check_same_bits

STEPS, EVERY, TOKENS = 5, 2, 4
PROMPTS = ["def f", "a", "import"]  # in two batches
MODEL = {"dModel": 16, "heads": 2, "blocks": 2, "context": 16, "learningRate": 0.05, "warmupSteps": 0}


def manifest(stages: int, pipelines: int, every: int = EVERY, **more: Any) -> dict[str, Any]:
    generation = {"prompts": PROMPTS, "tokens": TOKENS, **more.pop("generation", {})}
    return bamboojob(
        task={"entrypoint": "bamboo_trainer.models.gpt:build", "config": {**MODEL, "generation": generation}},
        training=training(STEPS, 8, 2, generation={"everySteps": every}),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": more.pop("mode", "LazyForward")},
        elastic={"minStages": stages},
        **more,
    )


class Recording(BranchingJob):
    """texts: that states have written, by the steps that these have seen. With kill: the kinds of instructions and the
    step at each of which a worker dies in a job of its own, every time that a cell comes to one; or, with every_th, one
    of so many times.
    """

    def __init__(
        self, *arguments: Any, kill: tuple[int, set[str]] = (-1, set()), every_th: int = 1, **more: Any
    ) -> None:
        super().__init__(*arguments, decide=lambda job: self._look(), **more)
        self.texts: dict[int, tuple[Continuation, ...]] = {}
        self._kill, self._every_th, self._times = kill, every_th, Counter[Fault]()

    def run(self, limit: int = 200_000) -> "Recording":
        super().run(limit)
        self._look()
        return self

    def _look(self) -> None:
        if self.state.progress.texts is not None:
            step, texts = self.state.progress.texts
            assert self.texts.setdefault(step, texts) == texts

    def strikes(self, fault: Fault) -> bool:
        step, names = self._kill
        if fault.step != step or fault.name not in names:
            return super().strikes(fault)
        self._times[fault] += 1  # of a batch of prompts once for each token
        turn = self._times[fault] + fault.microbatch + fault.cell.stage + fault.after
        return turn % self._every_th == 0 and self.branch((fault, self._times[fault]))


def plainly(layers: list[torch.nn.Module], prompt: str) -> str:
    """Greedy, as one does it in plain PyTorch: without anything behind the text so far."""
    tokens = list(prompt.encode())
    with torch.no_grad():
        for _ in range(TOKENS):
            passed = (torch.tensor([tokens]),)
            for index, layer in enumerate(layers):
                passed = run_layer(layer.eval(), index, passed)
            tokens.append(int(passed[0][0, -1].argmax()))
    return bytes(tokens[len(prompt) :]).decode("utf-8", "replace")


def layers_of(job: Job) -> list[torch.nn.Module]:
    """With the weights that the job has ended with."""
    stages = [s.stage for node in job.nodes.values() for s in node.states.values() if s.stage and s.owned]
    weights = {name: tensor for stage in stages for name, tensor in stage.values.state_tensors().items()}
    layers = [build_layer(job.task, 0, index) for index in range(len(job.task.layers))]
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        layer.load_state_dict(own)
    return layers


def test_the_texts_are_those_of_plain_pytorch_and_do_not_depend_on_the_grid() -> None:
    jobs = [Recording(manifest(*grid)).run() for grid in ((1, 1), (3, 1), (2, 2), (1, 3), (4, 2))]
    check_same_bits(*jobs)
    for job in jobs:
        assert job.texts == jobs[0].texts
        assert list(job.texts) == [2, 4, STEPS]
    layers = layers_of(jobs[0])
    expected = tuple(Continuation(prompt=prompt, text=plainly(layers, prompt)) for prompt in PROMPTS)
    assert jobs[0].texts[STEPS] == expected
    told = [emit.message for emit in jobs[0].emitted if emit.reason == "Generated"]
    assert [text.partition(":")[0] for text in told] == ["after step 2", "after step 4", f"after step {STEPS}"]
    assert told[0].endswith("; and 2 others")


def test_texts_that_are_drawn_do_not_depend_on_the_grid_and_are_others_in_another_state() -> None:
    drawn = {"temperature": 5.0, "tokens": 8}
    jobs = [Recording(manifest(*grid, every=1, generation=drawn)).run() for grid in ((1, 1), (3, 2))]
    assert jobs[0].texts == jobs[1].texts
    texts = [one.text for texts in jobs[0].texts.values() for one in texts]
    assert len(set(texts)) == len(texts) == STEPS * len(PROMPTS)


def test_texts_change_nothing_of_the_training() -> None:
    with_them = Job(manifest(3, 1, every=1)).run()
    document = manifest(3, 1)
    del document["spec"]["training"]["generation"]
    without = Job(document).run()
    assert (with_them.state.progress.losses, with_them.digests) == (without.state.progress.losses, without.digests)


@pytest.mark.parametrize(
    ("grid", "mode", "step", "names", "every_th"),
    [
        pytest.param((3, 1), "LazyForward", 2, {"Generate", "ReportReady"}, 1, marks=pytest.mark.slow),
        pytest.param((2, 2), "EagerForward", STEPS, {"Generate"}, 1, marks=pytest.mark.slow),
        ((1, 2), "LazyForward", 4, {"Generate"}, 2),
    ],
)
def test_a_kill_at_any_token_changes_nothing(
    grid: tuple[int, int], mode: str, step: int, names: set[str], every_th: int
) -> None:
    """Each token is one at which somebody is killed."""
    document = manifest(*grid, mode=mode, standby={"workers": 1})
    undisturbed = Recording(document).run()

    def judge(job: Job) -> None:
        assert isinstance(job, Recording)
        assert job.finish is not None
        assert job.finish.reason == "Complete", (job.finish, job.emitted)
        assert job.texts == undisturbed.texts
        assert (job.digests, job.state.progress.losses) == (undisturbed.digests, undisturbed.state.progress.losses)
        told = [emit.message for emit in job.emitted if emit.reason == "Generated"]
        assert len(told) == len(set(told)) == len(undisturbed.texts)

    struck = each_way(lambda: Recording(document, kill=(step, names), every_th=every_th), judge)
    assert {fault.name for fault, _ in struck} == names
    assert {times for _, times in struck} == set(range(1, TOKENS + 2))


@pytest.mark.parametrize("places", [(0, 3), (3, 0), (0, 1), (2, 3), (1, 3)])
def test_two_losses_in_the_middle_of_a_text_change_nothing(places: tuple[int, int]) -> None:
    """Also the first and the last stage, of which each has the other one's tokens."""
    document = manifest(4, 1, standby={"workers": 2})
    undisturbed = Recording(document).run()
    first, second = (Fault("Generate", Cell(0, place), 2, 1, after=True) for place in places)
    job = Recording(document, (first, second)).run()
    assert job.state.membership.preemptions == 2
    assert (job.digests, job.texts) == (undisturbed.digests, undisturbed.texts)


def test_a_job_that_goes_on_from_a_checkpoint_on_another_grid_writes_the_same_texts() -> None:
    checkpoint = {"storage": {"uri": "memory://store"}, "everySteps": 3}
    undisturbed = Recording(manifest(2, 1)).run()
    short = manifest(3, 1, checkpoint=checkpoint)
    short["spec"]["training"]["steps"] = 3
    first = Recording(short).run()
    rest = Recording(manifest(2, 2, checkpoint=checkpoint), store=first.store).run()
    assert list(rest.texts) == [4, STEPS]
    assert {**first.texts, **rest.texts} == {**undisturbed.texts, 3: first.texts[3]}


def test_evaluations_and_texts_of_one_state_are_told_together() -> None:
    document = manifest(2, 2)
    document["spec"]["task"]["entrypoint"] = "test_generation:build_evaluated"
    document["spec"]["training"]["evaluation"] = {"everySteps": EVERY}
    job = Recording(document).run()
    assert job.texts == Recording(manifest(1, 1)).run().texts
    assert list(job.state.progress.evaluations) == list(job.texts)


def build_evaluated(config: Mapping[str, Any]) -> Task:
    task = load_task("bamboo_trainer.models.gpt:build", config)
    return replace(task, evaluation=Evaluation(dataset=Few(task.dataset)))


class Few:
    """The first samples of a dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return 5

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        return self._dataset.batch(indices)


# the next token


def test_of_equal_tokens_the_lowest_is_taken_and_what_is_no_number_is_never() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, 3.0, 3.0], [nan, -2.0, nan], [nan, nan, nan], [0.0, inf, inf], [-inf, -inf, -5.0]]
    assert [chosen(torch.tensor(row, dtype=torch.float64), 0.0, 1) for row in rows] == [1, 1, 0, 1, 2]
    assert [chosen(torch.tensor(row, dtype=torch.float64), 0.01, 1) for row in rows[1:2] + rows[4:]] == [1, 2]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    shares = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)
    drawn = Counter(chosen(shares.log() * 0.7, 0.7, seed) for seed in range(2000))
    assert set(drawn) == {0, 2, 3}
    assert [drawn[token] / 2000 for token in (0, 2, 3)] == pytest.approx([0.5, 0.2, 0.3], abs=0.04)
    assert chosen(shares, 1e300, 5) == chosen(shares, 1e300, 5)


def said(**changes: Any) -> TextGeneration:
    found = TextGeneration(prompts=[[1, 2, 3], [4]], tokens=2, decode=lambda tokens: "".join(map(str, tokens)))
    return replace(found, **changes)


def test_a_text_ends_with_its_end_and_is_bounded() -> None:
    rows = first_tokens(said(padding=9), 0, 2)
    assert rows.tolist() == [[1, 2, 3, 9, 9], [4, 9, 9, 9, 9]]
    assert continuation(said(), 1, [4, 5, 6, 9, 9]) == Continuation(prompt="4", text="56")
    assert continuation(said(end=6), 1, [4, 5, 6, 9, 9]) == Continuation(prompt="4", text="5")
    long = continuation(said(decode=lambda tokens: "\udc80" + "x" * 10_000), 1, [4, 5, 6, 9, 9])
    assert long.text.startswith("?xx")
    assert MOST_TEXT - 2 <= len(long.text) <= MOST_TEXT


# what cannot be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "generation.prompts: expected a list of 1 to 16 prompts, got 0"),
        ({"prompts": [[1]] * 17}, "generation.prompts: expected a list of 1 to 16 prompts, got 17"),
        ({"prompts": torch.ones(1, 2)}, "generation.prompts: expected a list of 1 to 16 prompts, got Tensor"),
        ({"prompts": [[1], "text"]}, r"generation.prompts\[1\]: expected a list of token ids"),
        ({"prompts": [[]]}, r"generation.prompts\[0\]: expected a list of token ids, at least one"),
        ({"tokens": 513}, "generation.tokens: expected a number from 1 to 512, got 513"),
        ({"temperature": float("inf")}, "generation.temperature: expected a number of at least 0, got inf"),
        ({"end": -1}, "generation.padding and generation.end: expected token ids"),
    ],
)
def test_what_cannot_be_continued_is_told_when_the_task_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        generation_schedule(small_task(generation=said(**changes)), parse_manifest(manifest(1, 1)).training)


def test_a_task_without_the_fact_is_refused() -> None:
    with pytest.raises(TaskError, match=r"training.generation is set, but the task has no `generation`: no prompts"):
        generation_schedule(small_task(), parse_manifest(manifest(1, 1)).training)


def test_a_model_without_logits_is_refused_before_the_job_runs() -> None:
    inputs = said(inputs=lambda tokens: (tokens.float()[:, :2],))
    with pytest.raises(TaskError, match=r"expected logits of each of the tokens \[2, 5\], .* got \[2, 2\]"):
        try_measurements(small_task(generation=inputs), parse_manifest(manifest(1, 1)))


def test_what_the_functions_of_a_task_raise_is_told_by_name() -> None:
    task = small_task(generation=said(decode=lambda tokens: tokens[7], inputs=lambda tokens: (tokens.float(),)))
    with pytest.raises(TaskError, match=r"generation.decode raised IndexError"):
        continuation(task.generation, 0, [1, 2, 3, 4, 5])  # type: ignore[arg-type]
    stage = build_stage(replace(task, generation=said(inputs=lambda tokens: tokens)), 0, [(0, 3)], CONFIG)
    with pytest.raises(TaskError, match=r"generation.inputs: expected a tuple of tensors"):
        stage.generate(begin(stage), 0, 0, None)
