"""Initial weights from files: the formats, their match with the model, each refusal, and jobs that begin with them."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import plain_models
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import InitialSpec
from bamboo_trainer.checkpoint.initial import (
    FirstTask,
    Matching,
    WantedTensor,
    begin_with,
    match,
    open_weights,
)
from bamboo_trainer.checkpoint.layer_file import StateEntry
from bamboo_trainer.checkpoint.sources import TensorFiles
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import from_module
from bamboo_trainer.split.layers import SplitLayer
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection import layer_costs
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from export_kit import write
from manifest_kit import bamboojob, training
from stage_kit import chain, small_task
from training_job import Job, MemoryStore

THERE = {"embed.weight": (5, 2), "h.0.weight": (2, 2), "h.1.weight": (2, 2), "head.weight": (5, 2)}


def offered(shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> list[StateEntry]:
    return [
        StateEntry(name=name, layer=0, tensor=name, dtype=dtype, shape=shape, complex=False, bytes=0)
        for name, shape in shapes.items()
    ]


def wanted(shapes: dict[str, tuple[int, ...]]) -> list[WantedTensor]:
    """Return the tensors of a model. shapes: the tensors' shapes by name; a "+" joins the names of one tied tensor."""
    return [
        WantedTensor(names=tuple(names.split("+")), places=((0, names),), shape=shape, dtype=torch.float32)
        for names, shape in shapes.items()
    ]


def matched(model: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]] = THERE, **fields: Any) -> Matching:
    return match(wanted(model), offered(there), InitialSpec(url="x", **fields), "x")


def taken(matching: Matching) -> dict[str, str]:
    return {take.wanted.names[0]: take.offers[0].name for take in matching.takes}


def test_what_is_dropped_there_and_has_a_name_of_the_model_begins_anew() -> None:
    found = matched(THERE, drop=("h.*", "head.weight"))
    assert (found.left, found.anew) == (("h.0.weight", "h.1.weight", "head.weight"),) * 2
    assert found.in_words("x")[1:] == [
        "left there: h.0.weight, h.1.weight, head.weight",
        "begun anew: h.0.weight, h.1.weight, head.weight",
    ]


def test_values_of_another_width_of_floats_are_taken() -> None:
    found = match(wanted(THERE), offered(THERE, "BF16"), InitialSpec(url="x"), "x")
    assert len(found.takes) == 4


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (
            {**THERE, "more": (1,)},
            {},
            "task.initialFrom: x does not have more of the model: drop: [more] lets it begin anew",
        ),
        (
            {"embed.weight": (5, 2), "head.weight": (5, 2)},
            {},
            "task.initialFrom: x has h.0.weight, h.1.weight, which the model does not have: drop: "
            "[h.0.weight] leaves it there",
        ),
        (
            {"a": (5, 2)},
            {},
            "task.initialFrom: nothing is taken: x has embed.weight, h.0.weight, h.1.weight, head.weight, and the "
            "model a; write a file with the model's names",
        ),
        (
            THERE | {"head.weight": (3, 2)},
            {},
            "task.initialFrom: head.weight is [5, 2] there and head.weight [3, 2] in the model: drop: [head.weight] "
            "lets it begin anew",
        ),
        (
            THERE | {"head.weight": (5, 3)},
            {},
            "task.initialFrom: head.weight is [5, 2] there and head.weight [5, 3] in the model: drop: [head.weight] "
            "lets it begin anew",
        ),
        (THERE, {"drop": ("hed*",)}, "task.initialFrom.drop: no tensor fits 'hed*'"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_told(model: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as error:
        matched(model, **fields)
    assert str(error.value) == message


def test_whole_numbers_are_no_floats() -> None:
    with pytest.raises(TaskError, match=r"embed.weight is of torch.int64 there, expected torch.float32"):
        match(wanted(THERE), offered(THERE, "I64"), InitialSpec(url="x"), "x")


def test_two_tensors_that_are_one_in_the_model_have_one_shape() -> None:
    model = {"embed.weight+head.weight": (5, 2), "h.0.weight": (2, 2), "h.1.weight": (2, 2)}
    assert len(matched(model).takes[0].offers) == 2
    with pytest.raises(TaskError, match=r"embed.weight is \[4, 2\] there and embed.weight \[5, 2\] in the model"):
        matched(model, THERE | {"embed.weight": (4, 2)})


ONE, TWO = {"layers.0.module.a": torch.ones(2)}, {"layers.1.module.b": torch.ones(3)}


def names(url: object, *, of_module: bool = True, **fields: Any) -> list[str]:
    _, entries, _ = open_weights(InitialSpec(url=str(url), **fields), of_module=of_module)
    return [entry.name for entry in entries]


def test_the_weights_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    save_file({**ONE, **TWO}, tmp_path / "weights" / "model.safetensors")
    assert names(tmp_path / "weights") == ["a", "b"]
    assert names(f"file://{tmp_path}/weights", of_module=False) == [*ONE, *TWO]
    with pytest.raises(TaskError, match=r"expected a folder of weights, such as .*weights, got"):
        names(tmp_path)
    with pytest.raises(TaskError, match=r"task.initialFrom.step: expected only with checkpoints, and .* has weights"):
        names(tmp_path / "weights", step=3)


def test_a_published_folder_and_its_file(tmp_path: Path) -> None:
    for number, tensors in enumerate((ONE, TWO)):
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{n}.safetensors" for n, one in enumerate((ONE, TWO)) for name in one}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names(tmp_path) == ["a", "b"]
    assert names(tmp_path / "model-1.safetensors") == ["b"]
    (tmp_path / "model-1.safetensors").write_bytes(b"no weights")
    with pytest.raises(TaskError, match=r"task.initialFrom: cannot read .*model-1.safetensors"):
        names(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(TaskError, match=r"model.safetensors.index.json names model-1.safetensors, which is not there"):
        names(tmp_path)


def test_a_checkpoint_of_a_step(tmp_path: Path) -> None:
    stages = chain(small_task(), [(0, 2), (2, 3)])
    write(CheckpointStore(str(tmp_path)), stages, 0)
    assert names(tmp_path, step=0) == ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
    with pytest.raises(TaskError, match=r"step: expected the step of a checkpoint; the newest one in .* is of step 0"):
        names(tmp_path)
    with pytest.raises(TaskError, match=r"has no complete checkpoint of step 4; complete: steps 0"):
        names(tmp_path, step=4)
    task, lines = begin_with(InitialSpec(url=str(tmp_path), step=0), small_task())
    taken, own = (build_layer(task, 9, 2).state_dict(), stages[1].values.layers[2].state_dict())
    assert all(torch.equal(taken[name], tensor) for name, tensor in own.items())
    assert lines == [f"taken from the checkpoint of step 0 in {tmp_path}: 4 tensors"]


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task.initialFrom.url: there is no .*absent"):
        names(tmp_path / "absent")
    with pytest.raises(TaskError, match=r"task.initialFrom: .* has no complete checkpoint"):
        names(tmp_path)
    with pytest.raises(TaskError, match=r"task.initialFrom.url ftp://x: nothing is known of ftp://"):
        names("ftp://x")


WORDS, WIDTH = 11, 8


class Tagger(nn.Module):
    """A model with embeddings of words and positions, blocks, and a head. tied: the head has the words' weight."""

    def __init__(self, positions: int, classes: int, tied: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(positions, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(WIDTH).eval(), nn.Linear(WIDTH, classes, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(self.norm(x.mean(1)))
        return out


def build(config: Mapping[str, Any]) -> Task:
    positions, classes = config.get("positions", 4), config.get("classes", WORDS)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (16, 4), generator=draw)
    return from_module(
        partial(Tagger, positions, classes, config.get("tied", False)),
        loss=plain_models.of_rows,
        dataset=TensorDataset((tokens,), (tokens[:, 0] % classes,)),
        blocks="blocks",
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        learning_rate=0.01,
    )


def state(task: Task, seed: int = 0) -> dict[str, Tensor]:
    """Return a task's initial tensors by their names in the whole module."""
    layers = [build_layer(task, seed, n) for n in range(len(task.layers))]
    return {name.removeprefix("module."): t.detach().clone() for one in layers for name, t in one.state_dict().items()}


def spec(url: object, **fields: Any) -> InitialSpec:
    return InitialSpec(url=str(url), **fields)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write the task's initial weights of seed 5 into a file, by the module's own names, and return its path."""
    save_file(state(build({}), 5), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_each_tensor_has_the_value_of_its_name(file: Path) -> None:
    task, lines = begin_with(spec(file), build({}))
    assert same(state(task, 0), state(build({}), 5))
    assert not same(state(build({}), 0), state(build({}), 5))
    assert lines == [f"taken from {file}: 14 tensors"]


def test_each_layer_reads_its_own_tensors_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = TensorFiles.tensors

    def noted(self: TensorFiles, number: int, entries: Any) -> Mapping[str, Tensor]:
        asked.extend(entry.name for entry in entries)
        return read(self, number, entries)

    monkeypatch.setattr(TensorFiles, "tensors", noted)
    task, _ = begin_with(spec(file), build({}))
    assert asked == []
    build_layer(task, 0, 2)
    assert asked == ["blocks.1.0.weight", "blocks.1.0.bias"]
    layer_costs(task, 2)
    assert len(asked) == 2, "nothing is read for layers that are only looked at"


def test_a_head_of_another_size_begins_anew_where_it_is_dropped(file: Path) -> None:
    task, lines = begin_with(spec(file, drop=("head.*",)), build({"classes": 3}))
    own, before, other = state(task, 0), state(build({"classes": 3}), 0), state(build({}), 5)
    assert torch.equal(own["head.weight"], before["head.weight"])
    assert same({**own, "head.weight": other["head.weight"]}, other)
    assert lines[1:] == ["left there: head.weight", "begun anew: head.weight"]


def test_a_tied_tensor_is_taken_from_whichever_of_its_names_is_there(tmp_path: Path) -> None:
    plain, tied = state(build({}), 5), build({"tied": True})
    for name in ("words.weight", "head.weight"):
        other = {key: value for key, value in plain.items() if key not in {"words.weight", "head.weight"} - {name}}
        save_file(other, tmp_path / f"{name}.safetensors")
        task, _ = begin_with(spec(tmp_path / f"{name}.safetensors"), tied)
        own = state(task)
        assert torch.equal(own["words.weight"], plain[name])
        assert torch.equal(own["head.weight"], plain[name])


def test_two_tensors_of_one_that_is_tied_have_to_be_equal(file: Path) -> None:
    task, _ = begin_with(spec(file), build({"tied": True}))
    with pytest.raises(
        TaskError, match=r"words.weight and head.weight differ, and are one tensor of the model \(words"
    ):
        state(task)
    task, _ = begin_with(spec(file, drop=("head.weight",)), build({"tied": True}))
    assert torch.equal(state(task)["head.weight"], state(build({}), 5)["words.weight"])


def test_layers_of_a_list_are_known_by_their_numbers(tmp_path: Path) -> None:
    layers = {
        f"layers.{n}.{name}": t + 1 for n in (0, 2) for name, t in build_layer(small_task(), 5, n).state_dict().items()
    }
    save_file(layers, tmp_path / "a.safetensors")
    task, _ = begin_with(spec(tmp_path / "a.safetensors"), small_task())
    assert torch.equal(build_layer(task, 0, 2).weight, layers["layers.2.weight"])
    assert not isinstance(build_layer(task, 0, 0), SplitLayer)


def test_nothing_is_looked_at_before_it_is_asked_for(tmp_path: Path) -> None:
    told = list[str]()
    first = FirstTask(spec(tmp_path / "nothing"), small_task(), told.append)
    with pytest.raises(TaskError, match=r"task.initialFrom.url: there is no .*nothing"):
        first.get()
    assert told == []
    assert FirstTask(None, small_task(), told.append).get() is not None


# Jobs


def task_with(initial: dict[str, Any] | None) -> dict[str, Any]:
    task = {"entrypoint": "test_initial:build", "config": {"classes": 3}}
    return task | ({"initialFrom": initial} if initial else {})


def manifest(
    initial: dict[str, Any] | None, stages: int, pipelines: int, steps: int = 4, **more: Any
) -> dict[str, Any]:
    return bamboojob(
        task=task_with(initial),
        training=training(steps, 12, 2, maxGradientNorm=1.0),
        topology={"stages": stages, "pipelines": pipelines},
        redundancy={"mode": "Replicas"},
        **more,
    )


def initial_task(folder: Path) -> dict[str, Any]:
    """Write weights into a folder as another job leaves them. Return a `task` that takes all but the head's."""
    whole = state(build({}), 5)
    split = build({})
    layers = {
        f"layers.{n}.{name}": whole[name.removeprefix("module.")]
        for n in range(len(split.layers))
        for name in build_layer(split, 5, n).state_dict()
    }
    save_file(layers, folder / "model.safetensors")
    return task_with({"url": str(folder), "drop": ["head.weight"]})


def test_a_job_says_what_it_took(tmp_path: Path) -> None:
    initial = initial_task(tmp_path)["initialFrom"]
    alone, plain = (Job(manifest(one, 1, 1)).run() for one in (initial, None))
    assert plain.state.progress.losses != alone.state.progress.losses
    told = [emit for emit in alone.emitted if emit.reason == "InitialWeights"]
    assert [emit.message for emit in told] == [
        f"taken from {tmp_path}: 13 tensors; left there: head.weight; begun anew: head.weight"
    ]


def test_a_job_that_goes_on_from_its_checkpoint_does_not_look(file: Path) -> None:
    initial = {"url": str(file), "drop": ["head.weight"]}
    kept = {"checkpoint": {"storage": "memory://x", "everySteps": 2}}
    whole = Job(manifest(initial, 2, 1, steps=6, **kept)).run()
    store = MemoryStore()
    Job(manifest(initial, 2, 1, steps=4, **kept), store=store).run()
    file.unlink()
    resumed = Job(manifest(initial, 3, 1, steps=6, **kept), store=store).run()
    assert resumed.bits == whole.bits
    assert not [emit for emit in resumed.emitted if emit.reason == "InitialWeights"]


def test_the_numbers_of_a_training_depend_on_it(file: Path) -> None:
    documents = [manifest(None, 1, 1), manifest({"url": "a"}, 1, 1), manifest({"url": "a", "drop": ["b"]}, 1, 1)]
    assert len({numbers_digest(parse_manifest(document)) for document in documents}) == 3
