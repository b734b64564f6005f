"""Training begins with other weights, the same ones on any grid and whoever is lost."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import plain_models
from bamboo_core.job.edits import numbers_digest
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import InitialSpec
from bamboo_trainer.checkpoint.sources import TensorFiles
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import from_module
from bamboo_trainer.initial.first_task import FirstTask, begin_with
from bamboo_trainer.lora import merged, with_lora
from bamboo_trainer.split.layers import SplitLayer
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from manifest_kit import bamboojob, training
from stage_kit import small_task
from training_job import Job, MemoryStore

WORDS, WIDTH = 11, 8


class Tagger(nn.Module):
    """Words and positions, blocks, and a head; tied: the head's weight is the words'."""

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
    task = from_module(
        partial(Tagger, positions, classes, config.get("tied", False)),
        loss=plain_models.of_rows,
        dataset=TensorDataset((tokens,), (tokens[:, 0] % classes,)),
        blocks="blocks",
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        learning_rate=0.01,
    )
    return with_lora(task, rank=2, alpha=4.0, targets=("*0",)) if config.get("lora") else task


def state(task: Task, seed: int = 0) -> dict[str, Tensor]:
    """By the whole module's names."""
    layers = [build_layer(task, seed, n) for n in range(len(task.layers))]
    return {name.removeprefix("module."): t.detach().clone() for one in layers for name, t in one.state_dict().items()}


def spec(url: object, **fields: Any) -> InitialSpec:
    return InitialSpec(url=str(url), **fields)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Weights of the task with the seed 5, as one file with the module's own names."""
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


def test_adapters_are_merged_into_their_weights(tmp_path: Path) -> None:
    adapted = {name: t + 0.1 for name, t in state(build({"lora": True}), 5).items() if t.is_floating_point()}
    adapted |= {name: t for name, t in state(build({"lora": True}), 5).items() if not t.is_floating_point()}
    save_file(adapted, tmp_path / "adapted.safetensors")
    task, lines = begin_with(spec(tmp_path / "adapted.safetensors"), build({}))
    assert same(state(task), merged(adapted))
    assert lines == [f"taken from {tmp_path / 'adapted.safetensors'}: 14 tensors, 3 adapters merged into them"]
    again, _ = begin_with(spec(tmp_path / "adapted.safetensors"), build({"lora": True}))
    assert same(state(again), adapted), "a model with adapters takes them as they are"


def test_weights_without_adapters_begin_a_model_with_new_ones(file: Path) -> None:
    task, lines = begin_with(spec(file), build({"lora": True}))
    assert same(merged(state(task)), state(build({}), 5))
    assert lines[-1].startswith("begun anew: ")
    assert all(".lora_" in name for name in lines[-1].removeprefix("begun anew: ").split(" and ")[0].split(", "))


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
    task = {"entrypoint": "test_initial_first_task:build", "config": {"classes": 3}}
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
    """Begins with the weights that another job has left in the folder."""
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
