"""Models of transformers are split as they are: the same logits, losses and gradients, the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bamboo.checkpoint.layout import Attempt
from bamboo.checkpoint.store import CheckpointStore
from bamboo.planning.plan import Cell
from bamboo_trainer.checkpoint.__main__ import main as export
from bamboo_trainer.checkpoint.layer_file import encode
from bamboo_trainer.loading import load_task
from bamboo_trainer.models import huggingface
from bamboo_trainer.models.parts.huggingface_weights import PublishedWeights
from bamboo_trainer.reference import train
from bamboo_trainer.task import Task, Weighted
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, run_layer
from bamboo_trainer.training import TrainingConfig
from checkpoint_kit import make_manifest
from manifest_kit import bamboojob, training
from stage_kit import chain
from training_job import Fault, Job, check_same_bits

transformers = pytest.importorskip("transformers")
ENTRYPOINT = "bamboo_trainer.models.huggingface:build"
WORDS, LENGTH = 64, 12
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": WORDS,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": WORDS, "n_positions": 32},
    "llama": GROUPED,
    "qwen2": GROUPED | {
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1
    },
    "qwen3": GROUPED | {"head_dim": 8},
    "bert": SMALL,
    "mistral": GROUPED | {"sliding_window": 6},
    "gemma3_text": GROUPED | {
        "head_dim": 8, "sliding_window": 6, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "modernbert": SMALL | {"pad_token_id": 0, "local_attention": 8},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bloom": {"hidden_size": 16, "n_layer": 3, "n_head": 4, "vocab_size": WORDS},
}  # fmt: skip


FIRST = ("gpt2", "llama", "qwen2", "qwen3", "bert")
LOGITS = [
    *((family, "sdpa", True) for family in FIRST),
    *(pytest.param(f, "eager", True, marks=pytest.mark.slow) for f in FAMILIES if f not in FIRST),
    *(pytest.param(f, "sdpa", True, marks=pytest.mark.slow) for f in FAMILIES if f not in (*FIRST, "bloom")),
    *((family, "sdpa", False) for family in ("gpt2", "bert")),
    *((family, "eager", True) for family in ("qwen2", "bert")),
]  # fmt: skip
SLOW_LOSSES = [pytest.param(family, 2, 2, marks=pytest.mark.slow) for family in ("bert", "mixtral")]


def config_of(family: str, **more: Any) -> dict[str, Any]:
    data = {"length": LENGTH, "samples": 64, **more.pop("data", {})}
    return {"architecture": {"model_type": family, **FAMILIES[family]}, "data": data, **more}


def layers_of(task: Task) -> list[nn.Module]:
    layers = [build_layer(task, 0, n) for n in range(len(task.layers))]
    tie(dict(enumerate(layers)), tied_groups(task), task, 0)
    return layers


def state_of(layers: list[nn.Module]) -> dict[str, Tensor]:
    return {k.removeprefix("module."): t for layer in layers for k, t in layer.state_dict().items()}


def run(layers: list[nn.Module], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    passed: Any = inputs
    for number, layer in enumerate(layers):
        passed = run_layer(layer, number, passed, lambda given, layer=layer: call_layer(layer, given))
    return tuple(passed)


@pytest.mark.parametrize(("family", "attention", "padding"), LOGITS)
def test_logits_losses_and_gradients_are_those_of_transformers(family: str, attention: str, padding: bool) -> None:
    config = config_of(family, attention=attention, data={"padding": padding})
    task = huggingface.build(config)
    layers = layers_of(task)
    published = huggingface.published_config(huggingface.read_settings(config))
    objective = huggingface.objective_of(published)
    model = huggingface.make_model(published, objective, attention)
    assert not model.load_state_dict(state_of(layers), strict=False).missing_keys
    for module in (*layers, model):
        module.eval()
    inputs, (labels,) = task.dataset.batch([1, 5, 7])
    mask = inputs[1] if padding else torch.ones_like(inputs[0])
    theirs = {"labels": labels} if objective == "masked" else {"labels": labels, "shift_labels": labels}
    output = model(input_ids=inputs[0], attention_mask=mask if padding else None, **theirs)
    (logits,) = run(layers, inputs)
    assert torch.equal(logits[mask.bool()], output.logits[mask.bool()])
    weighted = task.loss((logits,), (labels,))
    assert isinstance(weighted, Weighted)
    loss = weighted.total / weighted.weight
    torch.testing.assert_close(loss, output.loss)
    loss.backward()
    output.loss.backward()
    ours = {k.removeprefix("module."): p.grad for layer in layers for k, p in layer.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad)


def job(config: dict[str, Any], stages: int, pipelines: int, *faults: Fault) -> Job:
    document = bamboojob(
        task={"entrypoint": ENTRYPOINT, "config": config},
        training=training(3, 8, 2, maxGradientNorm=1.0),
        topology={"stages": stages, "pipelines": pipelines},
        elastic={"minStages": stages, "stabilizationSeconds": 0},
    )
    return Job(document, faults=faults).run()


@pytest.mark.parametrize(("family", "stages", "pipelines"), [*SLOW_LOSSES, ("gpt2", 4, 1)])
def test_a_worker_is_lost_and_the_bits_stay(family: str, stages: int, pipelines: int) -> None:
    """With dropout, padding, and embeddings that are the head's, too."""
    config = config_of(family, data={"padding": True}, learningRate=1e-3)
    calm = job(config, stages, pipelines)
    fault = [f for f in calm.executed if f.step == 1 and f.cell == Cell(0, 1)][3]
    killed = job(config, stages, pipelines, fault)
    check_same_bits(calm, killed)
    plain = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=1.0, microbatches=4, micro_batch_size=2)
    losses, _ = train(load_task(ENTRYPOINT, config), plain, 3)
    torch.testing.assert_close(list(calm.state.losses.values()), list(losses), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of several files in bf16, with an index and what could be a tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(3)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILIES["gpt2"])).to(torch.bfloat16)
    made.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_is_read_layer_by_layer(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    tensor = PublishedWeights._tensor
    monkeypatch.setattr(PublishedWeights, "_tensor", lambda w, name, form: read.append(name) or tensor(w, name, form))
    task = huggingface.build({"model": str(published), "data": {"length": LENGTH}})
    assert read == []
    layer = build_layer(task, 0, 2)
    assert len(read) == 12
    assert all(".h.1." in name for name in read)
    expected = transformers.GPT2LMHeadModel.from_pretrained(published, dtype=torch.float32).state_dict()
    assert all(torch.equal(t, expected[k.removeprefix("module.")]) for k, t in layer.state_dict().items())
    state = state_of(layers_of(task))
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def test_a_base_model_without_a_head_prefix_is_read(tmp_path: Path) -> None:
    made = transformers.GPT2Model(transformers.GPT2Config(**FAMILIES["gpt2"]))
    made.save_pretrained(tmp_path)
    task = huggingface.build({"model": str(tmp_path), "data": {"length": LENGTH}})
    state = state_of(layers_of(task))
    assert torch.equal(state["transformer.h.2.mlp.c_fc.weight"], made.h[2].mlp.c_fc.weight)


def write_checkpoint(folder: Path, task: Task, state: dict[str, Tensor]) -> None:
    """Of two stages, as they write it."""
    store, place, parts = CheckpointStore(str(folder)), Attempt(0, "a"), {}
    for stage in chain(task, [(0, 3), (3, 5)]):
        for number, layer in stage._layers.items():
            prefix = f"layers.{number}."
            layer.load_state_dict({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})
        for number, layer_state in stage.layer_states().items():
            parts[number] = store.write_part(place, number, encode(layer_state))
    store.commit(make_manifest(place, [parts[number] for number in sorted(parts)]))


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bert"])
def test_what_was_trained_is_exported_and_loaded_by_transformers(family: str, tmp_path: Path) -> None:
    config = config_of(family, learningRate=1e-2)
    task = load_task(ENTRYPOINT, config)
    plain = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=2, micro_batch_size=2)
    _, state = train(task, plain, 2)
    kept = tmp_path / "kept"
    kept.mkdir()
    if family == "gpt2":
        write_checkpoint(kept, task, state)
    else:
        for stage in range(2):
            mine = {k: t for k, t in state.items() if (int(k.split(".")[1]) >= 3) == bool(stage)}
            save_file({k: t.clone() for k, t in mine.items()}, kept / f"stage-00{stage}.safetensors")
    manifest = tmp_path / "job.yaml"
    document = {"task": {"entrypoint": ENTRYPOINT, "config": config}, "training": training(2, 4, 2)}
    manifest.write_text(json.dumps(bamboojob(**document, topology={"stages": 2})))
    out = tmp_path / "out"
    arguments = ["--format", "huggingface", "--output", str(out), "--quiet"]
    assert export([*arguments, "--job", str(manifest), "--", str(kept)]) == 0
    auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(out, output_loading_info=True, local_files_only=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    layers = layers_of(task)
    for number, layer in enumerate(layers):
        prefix = f"layers.{number}."
        layer.load_state_dict({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})
    for module in (*layers, model):
        module.eval()
    inputs, _ = task.dataset.batch([3, 4])
    assert torch.equal(run(layers, inputs)[0], model(input_ids=inputs[0]).logits)


def test_tokenizer_files_come_along_and_the_folder_may_be_elsewhere(published: Path, tmp_path: Path) -> None:
    task = huggingface.build({"model": str(published), "data": {"length": LENGTH}})
    _, state = train(
        task, TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=1, micro_batch_size=2), 1
    )
    save_file({k: t.clone() for k, t in state.items()}, tmp_path / "stage-000.safetensors")
    out = tmp_path / "out"
    arguments = ["--format", "huggingface", "--output", str(out), "--quiet", "--", str(tmp_path)]
    assert export(arguments) == 1
    assert export(["--model", str(published), *arguments]) == 0
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((out / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def test_masked_tokens_are_chosen_by_the_sample() -> None:
    task = huggingface.build(config_of("bert", data={"padding": True, "length": 400}))
    (ids, mask), (labels,) = task.dataset.batch(range(20))
    (again, _), (targets,) = task.dataset.batch([7])
    assert torch.equal(ids[7:8], again)
    assert torch.equal(labels[7:8], targets)
    chosen = labels != -100
    assert not (chosen & ~mask.bool()).any()
    assert 0.12 < chosen.sum() / mask.sum() < 0.18
    assert 0.7 < (ids[chosen] == huggingface.mask_token(transformers.BertConfig(vocab_size=WORDS))).float().mean() < 0.9


@pytest.mark.parametrize(("config", "said"), [
    ({}, "expected one of model and architecture"),
    ({"architecture": "gpt2", "model": "x"}, "expected one of model and architecture"),
    ({"modell": "x"}, "unknown key 'modell', expected some of model, architecture"),
    ({"model": "/nowhere"}, "model: /nowhere has no config.json"),
    ({"architecture": {"n_layer": 2}}, "architecture must have a model_type, such as gpt2"),
    ({"architecture": "no-such"}, "architecture: "),
    ({"architecture": "vit"}, "vit is no causal or masked language model of transformers"),
    (config_of("gpt2", objective="both"), "objective must be causal or masked, got 'both'"),
    (config_of("gpt2", attention="flash"), "attention must be sdpa or eager, got 'flash'"),
    (config_of("gpt2", learningRate=0), "learningRate must be positive, got 0.0"),
    (config_of("gpt2", data={"lenght": 3}), "data: unknown key 'lenght', expected some of length, samples"),
    (config_of("gpt2", blocks="h"), "blocks: the model has no 'h'"),
])  # fmt: skip
def test_a_config_that_cannot_be_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as refused:
        load_task(ENTRYPOINT, config)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_not_whole_is_refused(published: Path, tmp_path: Path) -> None:
    for path in published.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = content["weight_map"].pop("transformer.h.1.ln_1.weight")
    index.write_text(json.dumps(content))
    config = {"model": str(tmp_path), "data": {"length": LENGTH}}
    with pytest.raises(TaskError, match=r"has no tensor transformer.h.1.ln_1.weight; to begin with random values say"):
        load_task(ENTRYPOINT, config)
    (tmp_path / lost).unlink()
    with pytest.raises(TaskError, match=f"names {lost}, which is not there"):
        load_task(ENTRYPOINT, config)
    index.unlink()
    with pytest.raises(TaskError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_task(ENTRYPOINT, config)
    assert load_task(ENTRYPOINT, {**config, "random": True}).layers


def test_a_config_names_the_data_to_evaluate() -> None:
    config = config_of("gpt2", evaluation={"samples": 6})
    document = bamboojob(
        task={"entrypoint": ENTRYPOINT, "config": config},
        training={**training(1, 8, 2, evaluation={"everySteps": 1}), "steps": None, "until": {"tokens": 8 * LENGTH}},
        topology={"stages": 2},
    )
    done = Job(document).run()
    assert done.finish is not None
    assert done.finish.message == "all 1 steps are done"
    stages = [s.stage for node in done.nodes.values() for s in node.states.values() if s.stage and s.owned]
    tensors = {name: tensor for stage in stages for name, tensor in stage.state_tensors().items()}
    task = load_task(ENTRYPOINT, config)
    layers = layers_of(task)
    for n, layer in enumerate(layers):
        layer.load_state_dict({k: tensors[f"layers.{n}.{k}"] for k in layer.state_dict()}, strict=False)
        layer.eval()
    assert task.evaluation is not None
    inputs, targets = task.evaluation.dataset.batch(range(6))
    assert inputs[0].shape == (6, LENGTH), "the length is that of the data"
    assert not torch.equal(inputs[0], task.dataset.batch(range(6))[0][0])
    with torch.no_grad():
        logits = inputs
        for layer in layers:
            passed = call_layer(layer, logits if len(logits) > 1 else logits[0])
            logits = passed if isinstance(passed, tuple) else (passed,)
    loss = nn.functional.cross_entropy(logits[0].flatten(0, 1), targets[0].flatten())
    right = (logits[0].argmax(-1) == targets[0]).float().mean()
    assert done.state.evaluations[1] == pytest.approx({"loss": float(loss), "accuracy": float(right)}, rel=1e-4)
    with pytest.raises(TaskError, match="evaluation: expected a mask of those that count just if data has one"):
        load_task(ENTRYPOINT, config_of("gpt2", evaluation={"padding": True}))
