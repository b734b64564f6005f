"""Bamboo's models: sizes and logits of the published models, refused configs, evaluation."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bamboo_trainer.loading import load_task
from bamboo_trainer.task import Task, TrainingFacts
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from from_module_kit import layers_of, load_state, run
from manifest_kit import bamboojob, training
from training_job import Job

MODELS = ("gpt2", "bert", "llama")
LSTM = 4 * 1024  # rows of each of an LSTM's two matrices and two vectors
GNMT = (
    3 * 32000 * 1024
    + 32000  # words that are read, written, and foretold
    + 2 * LSTM * (1024 + 1024 + 2)  # read in both directions
    + LSTM * (2048 + 1024 + 2)
    + 6 * LSTM * (1024 + 1024 + 2)
    + LSTM * (1024 + 1024 + 2)
    + 7 * LSTM * (2048 + 1024 + 2)  # written, with what the attention has found
    + 2 * 1024 * 1024
    + 2 * 1024
    + 1
)
PUBLISHED = {
    ("gpt2", "small"): 124_439_808,
    ("gpt2", "medium"): 354_823_168,
    ("gpt2", "large"): 774_030_080,
    ("gpt2", "xl"): 1_557_611_200,
    ("bert", "large"): 335_174_458,
    ("bert", "base"): 109_514_298,
    ("llama", "2-7b"): 6_738_415_616,
    ("llama", "3-8b"): 8_030_261_248,
    ("llama", "3.2-1b"): 1_235_814_400,
    ("resnet:build", "152"): 60_192_808,
    ("resnet:build", "101"): 44_549_160,
    ("resnet:build", "50"): 25_557_032,
    ("translation:build", "16"): GNMT,
    ("nsdi2023.models:vgg", "19"): 143_667_240,
    ("nsdi2023.models:alexnet", "full"): 61_100_840,
}


def entrypoint(model: str) -> str:
    return model if ":" in model else f"bamboo_trainer.models.{model}:build"


def parameters(task: Task) -> int:
    """Return the number of parameters, without building values; a tied parameter counts once."""
    mode, again = FakeTensorMode(), {name for names in task.tied for name in names[1:]}
    known: dict[Callable[[], nn.Module], dict[str, int]] = {}
    for n, factory in enumerate(task.layers):
        if factory not in known:
            known[factory] = {k: p.numel() for k, p in build_layer(task, 0, n, mode).named_parameters()}
    return sum(s for n, f in enumerate(task.layers) for k, s in known[f].items() if f"{n}.{k}" not in again)


@pytest.mark.parametrize(("model", "size"), PUBLISHED)
def test_the_sizes_are_the_published_ones(model: str, size: str) -> None:
    assert parameters(load_task(entrypoint(model), {"size": size})) == PUBLISHED[model, size]


def published_names(model: str) -> list[tuple[list[str], str, bool]]:
    """Return (published names to concatenate, our name, whether to transpose) for each parameter of our tiny model."""
    same = {
        "gpt2": (
            "transformer.h.{}.",
            {"ln_1": "attention_norm", "ln_2": "mlp_norm"},
            {"attn.c_attn": "qkv", "attn.c_proj": "projection", "mlp.c_fc": "up", "mlp.c_proj": "down"},
            {
                "transformer.wte.weight": "0.token.weight",
                "transformer.wpe.weight": "0.position.weight",
                "transformer.ln_f.weight": "4.norm.weight",
                "transformer.ln_f.bias": "4.norm.bias",
            },
        ),
        "llama": (
            "model.layers.{}.",
            {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
            | {f"self_attn.{t}_proj": o for t, o in zip("qkvo", ("query", "key", "value", "projection"), strict=True)}
            | {f"mlp.{o}_proj": o for o in ("gate", "up", "down")},
            {},
            {
                "model.embed_tokens.weight": "0.token.weight",
                "model.norm.weight": "4.norm.weight",
                "lm_head.weight": "4.out.weight",
            },
        ),
        "bert": (
            "bert.encoder.layer.{}.",
            {
                "attention.output.dense": "projection",
                "attention.output.LayerNorm": "attention_norm",
                "intermediate.dense": "up",
                "output.dense": "down",
                "output.LayerNorm": "mlp_norm",
            },
            {},
            {
                f"bert.embeddings.{t}.weight": f"0.{o}.weight"
                for t, o in (
                    ("word_embeddings", "token"),
                    ("position_embeddings", "position"),
                    ("token_type_embeddings", "kind"),
                    ("LayerNorm", "norm"),
                )
            }
            | {"bert.embeddings.LayerNorm.bias": "0.norm.bias", "cls.predictions.bias": "4.out.bias"}
            | {
                f"cls.predictions.transform.{t}.{k}": f"4.{o}.{k}"
                for k in ("weight", "bias")
                for t, o in (("dense", "transform"), ("LayerNorm", "norm"))
            },
        ),
    }
    prefix, plain, transposed, others = same[model]
    found = [([theirs], ours, False) for theirs, ours in others.items()]
    for block in range(3):
        for kind in ("weight",) if model == "llama" else ("weight", "bias"):
            for names, turned in ((plain, False), (transposed, kind == "weight")):
                found += [
                    ([f"{prefix.format(block)}{t}.{kind}"], f"{block + 1}.{o}.{kind}", turned) for t, o in names.items()
                ]
            if model == "bert":
                parts = [f"{prefix.format(block)}attention.self.{one}.{kind}" for one in ("query", "key", "value")]
                found.append((parts, f"{block + 1}.qkv.{kind}", False))
    return found


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert"])
def test_logits_are_those_of_the_published_model(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 97}
    torch.manual_seed(1)
    theirs = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=97, n_positions=16)
        ),
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**common, num_attention_heads=2, max_position_embeddings=16)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **common | {"intermediate_size": 24}, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5
            )
        ),
    }[model]()
    theirs.eval()
    values = theirs.state_dict()
    for tensor in values.values():
        tensor += 0.1 * torch.randn_like(tensor)
    layers = layers_of(load_task(entrypoint(model), {"size": "tiny", "data": {"padding": model == "bert"}}))
    for layer in layers:
        layer.eval()
    own = {f"{n}.{k}": p for n, layer in enumerate(layers) for k, p in layer.named_parameters()}
    with torch.no_grad():
        for names, name, turned in published_names(model):
            value = torch.cat([values[one] for one in names])
            own.pop(name).copy_(value.T if turned else value)
    assert set(own) <= {"4.out.weight"}  # it is tied
    tokens = torch.randint(0, 97, (3, 16))
    mask = torch.arange(16) < torch.tensor([[16], [9], [12]])
    inputs = (tokens, mask) if model == "bert" else (tokens,)
    expected = theirs(input_ids=tokens, **({"attention_mask": mask.long()} if model == "bert" else {})).logits
    keep = mask if model == "bert" else torch.ones_like(mask)
    torch.testing.assert_close(run(layers, inputs)[0][keep], expected[keep], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_a_config_that_cannot_be_is_refused(model: str) -> None:
    for config, said in (
        ({"size": "huge"}, "size must be one of "),
        ({"sise": "tiny"}, "unknown key 'sise', did you mean size?"),
        ({"size": "tiny", "learningRate": "high"}, "learningRate must be a finite number, got 'high'"),
        ({"size": "tiny", "learningRate": 0}, "learningRate must be positive, got 0.0"),
        ({"size": "tiny", "data": {"samples": 0}}, "data: samples must be at least 1, got 0"),
    ):
        with pytest.raises(TaskError) as refused:
            load_task(entrypoint(model), config)
        assert said in str(refused.value)


@pytest.mark.parametrize("where", ["data", "evaluation"])
@pytest.mark.parametrize("model", ["gpt2", "bert", "llama"])
def test_sequences_longer_than_the_models_positions_are_refused(model: str, where: str) -> None:
    """Learned embeddings of positions limit the length of sequences; rotary positions do not."""
    config = {"size": "tiny", where: {"length": 17}}
    if model == "llama":
        load_task(entrypoint(model), config)
        return
    with pytest.raises(TaskError, match=rf"{where}: expected sequences of at most 16 tokens \(positions\), got 17"):
        load_task(entrypoint(model), config)


@pytest.mark.parametrize("token", [97, -1])
def test_a_token_that_the_model_does_not_have_is_named(token: int, tmp_path: Path) -> None:
    path, tokens = str(tmp_path / "x.npz"), np.array([[5, token, 6]])
    np.savez(path, inputs=tokens, targets=tokens)
    task = load_task(entrypoint("gpt2"), {"size": "tiny", "data": {"kind": "npz", "path": path}})
    with pytest.raises(ValueError, match=f"data: token {token} is outside of the model's vocabulary of 97"):
        task.dataset.batch([0])


def measured(model: nn.Sequential | list[nn.Module], task: Task) -> dict[str, float]:
    """Return loss and accuracy over all evaluation samples, computed as one batch in plain PyTorch."""
    assert task.evaluation is not None
    inputs, targets = task.evaluation.dataset.batch(range(len(task.evaluation.dataset)))
    with torch.no_grad():
        (logits,) = run(list(model), inputs)
        loss = task.loss((logits,), targets)
    right = (logits.argmax(-1) == targets[0])[targets[0] != -100]
    return {"loss": float(loss.total / loss.weight), "accuracy": float(right.float().mean())}


@pytest.mark.parametrize("model", MODELS)
def test_a_config_names_the_data_to_evaluate(model: str) -> None:
    """`evaluation` has the keys of `data`, but generates other samples. `epochs` sets the learning rate's decay."""
    config = {"size": "tiny", "evaluation": {"samples": 5}}
    facts = TrainingFacts(steps=None, epochs=2, global_batch_size=8, micro_batch_size=2)
    task = load_task(entrypoint(model), config, facts)
    assert task.evaluation is not None
    assert len(task.evaluation.dataset) == 5
    there, here = task.evaluation.dataset.batch(range(5)), task.dataset.batch(range(5))
    assert not torch.equal(there[0][0], here[0][0])
    assert task.learning_rate(127) < 0.11 * task.learning_rate(0), "512 samples, twice: 128 steps"
    document = bamboojob(
        task={"entrypoint": entrypoint(model), "config": config},
        training=training(1, 8, 2, evaluation={"everySteps": 1, "metric": "accuracy"}),
        topology={"stages": 2},
    )
    done = Job(document).run()
    layers = layers_of(task)
    load_state(layers, done.weights)
    assert done.state.progress.evaluations[1] == pytest.approx(measured(layers, task), rel=1e-4)
    assert load_task(entrypoint(model), {"size": "tiny"}).evaluation is None
    with pytest.raises(TaskError, match=r"task\.config: evaluation: samples must be at least 1, got 0"):
        load_task(entrypoint(model), {**config, "evaluation": {"samples": 0}})
