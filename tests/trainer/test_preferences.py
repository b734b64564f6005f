"""Learning from preferences: the losses of a loop by hand, the same bits whatever is lost, and what a reference is."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bamboo_core.job.spec import InitialSpec
from bamboo_trainer.data import Passes
from bamboo_trainer.initial.first_task import begin_with
from bamboo_trainer.loading import load_task
from bamboo_trainer.lora import with_lora
from bamboo_trainer.models import huggingface
from bamboo_trainer.models.parts.reference_model import REFERENCE
from bamboo_trainer.models.parts.sequences import IGNORED
from bamboo_trainer.tasks.task_errors import TaskError
from chats_kit import MARKED, PLAIN, WORDS, saved_model, words
from disturbed_jobs import STEPS, disturbed_alike
from transformers_kit import FAMILIES, layers_of, run, transformers

ENTRYPOINT = "bamboo_trainer.models.huggingface:build"
LENGTH = 12
BETA, SMOOTHING, RATE, WARMUP = 0.3, 0.1, 1e-2, 10


def architecture(family: str) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES[family]}


def folder_of(family: str, folder: Path, seed: int = 1) -> str:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def pairs(folder: Path) -> dict[str, Any]:
    """Pairs of several lengths."""
    rng = np.random.default_rng(2)
    ids = rng.integers(1, 64, (24, 2, LENGTH))
    ids[:, 1, :4] = ids[:, 0, :4]
    mask = (np.arange(LENGTH) < rng.integers(6, LENGTH + 1, (24, 2, 1))).astype(np.int64)
    labels = np.where((np.arange(LENGTH) >= 4) & (mask == 1), ids, IGNORED)
    np.savez(folder / "pairs.npz", ids=ids * mask, mask=mask, labels=labels)
    return {
        **{"kind": "npz", "path": str(folder / "pairs.npz"), "inputs": ["ids", "mask"], "targets": "labels"},
        **{"shift": True, "trim": 4, "nearLengths": 2},
    }


def by_hand(folder: str, data: dict[str, Any], order: Passes) -> list[float]:
    """The losses of a loop in plain PyTorch, with transformers' own model and a copy of it, as the rate warms up."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    reference = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    held = np.load(data["path"])
    ids, mask, labels = (torch.from_numpy(held[name]) for name in ("ids", "mask", "labels"))

    def answers(which: nn.Module, chosen: Tensor) -> Tensor:
        logits = which(input_ids=chosen_of(ids), attention_mask=chosen_of(mask)).logits[:, :-1]
        wanted = chosen_of(labels)[:, 1:]
        of_tokens = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        return (of_tokens * (wanted != IGNORED)).sum(-1).view(-1, 2)

    losses = []
    for step in range(STEPS):
        rows = torch.tensor(order.microbatch(0, step * 8, 8))

        def chosen_of(part: Tensor, rows: Tensor = rows) -> Tensor:
            return part[rows].flatten(0, 1)

        now, before = answers(model, rows), answers(reference, rows)
        margins = BETA * ((now[:, 0] - before[:, 0]) - (now[:, 1] - before[:, 1]))
        sigmoid = torch.nn.functional.logsigmoid
        loss = -((1 - SMOOTHING) * sigmoid(margins) + SMOOTHING * sigmoid(-margins)).mean()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = RATE * (step + 1) / WARMUP
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_the_losses_are_those_of_a_loop_by_hand_whatever_is_lost(tmp_path: Path) -> None:
    """Of a model whose head is its embedding, on several grids, with losses of workers and from a checkpoint. Steps
    have the samples that they have without `nearLengths`.
    """
    folder, data = folder_of("gpt2", tmp_path / "model"), pairs(tmp_path)
    config = {
        **{"model": folder, "objective": "preference", "beta": BETA, "labelSmoothing": SMOOTHING},
        **{"data": data, "learningRate": RATE, "warmupSteps": WARMUP},
    }
    alone = disturbed_alike({"entrypoint": ENTRYPOINT, "config": config})
    losses = [alone.state.progress.losses[step] for step in range(STEPS)]
    assert losses == pytest.approx(by_hand(folder, data, Passes(24)), abs=1e-6)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    told = alone.state.progress.metrics
    assert told["reward_margin"] == pytest.approx(told["reward_chosen"] - told["reward_rejected"], abs=1e-6)
    assert 0 <= told["reward_accuracy"] <= 1


LORA = {"rank": 2, "targets": ["*q_proj", "*v_proj"]}


@pytest.mark.parametrize(("family", "lora"), [("gpt2", {}), ("llama", {}), ("llama", {"lora": LORA})])
def test_a_reference_stays_what_the_model_was(family: str, lora: dict[str, Any], tmp_path: Path) -> None:
    """With adapters it is the model without them, and has copies of adapters alone."""
    folder = folder_of(family, tmp_path / "model")
    config = {"model": folder, "objective": "preference", "data": {"kind": "random", "length": LENGTH, "samples": 16}}
    task = huggingface.build(config | lora)
    layers = layers_of(task)
    inputs, targets = task.dataset.batch([0, 1, 2])
    first = run(layers, inputs)
    torch.testing.assert_close(first[0], first[1])
    ids, mask, labels = (part.flatten(0, 1) for part in inputs)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    logits = theirs(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    expected = (logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != IGNORED)).sum(-1).view(-1, 2)
    torch.testing.assert_close(first[1], expected)
    trained = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad}
    copies = [name for layer in layers for name, _ in layer.get_submodule(REFERENCE).named_parameters()]
    if lora:
        assert copies
        assert all("lora_" in name for name in copies)
    loss = task.loss(first, targets)
    assert isinstance(loss, Tensor)
    loss.backward()
    with torch.no_grad():
        for parameter in trained.values():
            if parameter.grad is not None:
                parameter -= parameter.grad
    later = run(layers, inputs)
    torch.testing.assert_close(later[1], first[1], rtol=0, atol=0)
    less = task.loss(later, targets)
    assert isinstance(less, Tensor)
    assert less.item() < loss.item()
    assert not any(REFERENCE in name for layer in layers for name in layer.state_dict())


def test_a_task_that_begins_with_other_weights_has_them_as_its_reference(tmp_path: Path) -> None:
    config = {
        **{"architecture": architecture("gpt2"), "objective": "preference"},
        "data": {"kind": "random", "length": LENGTH, "samples": 16},
    }
    task = load_task(ENTRYPOINT, config)
    begun, _ = begin_with(InitialSpec(url=folder_of("gpt2", tmp_path / "model", seed=7)), task)
    same = huggingface.build({"model": str(tmp_path / "model"), **{k: config[k] for k in ("objective", "data")}})
    inputs, _ = task.dataset.batch([0, 1])
    anew, taken, expected = (run(layers_of(one), inputs) for one in (task, begun, same))
    torch.testing.assert_close(taken, expected)
    torch.testing.assert_close(taken[0], taken[1])
    torch.testing.assert_close(anew[0], anew[1])
    assert not torch.allclose(anew[0], taken[0])


TALKS: list[dict[str, Any]] = [
    {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4 w5"},
    {
        "prompt": [
            {"role": "user", "content": "w6"},
            {"role": "assistant", "content": "w7"},
            {"role": "user", "content": "w8"},
        ],
        "chosen": [{"role": "assistant", "content": "w9"}],
        "rejected": [{"role": "assistant", "content": "w10"}],
    },
    {
        "chosen": [{"role": "user", "content": "w11"}, {"role": "assistant", "content": "w12"}],
        "rejected": [{"role": "user", "content": "w11"}, {"role": "assistant", "content": "w13"}],
    },
    {"prompt": " ".join(["w1"] * 30), "chosen": "w3", "rejected": "w4"},
]


def file(folder: Path, lines: list[dict[str, Any]]) -> str:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "pairs.jsonl")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_pairs_the_answers_behind_the_prompt_count(template: str, tmp_path: Path) -> None:
    data = {"kind": "preferences", "path": file(tmp_path, TALKS), "length": 16}
    config = {"model": str(saved_model(tmp_path / "model", template)), "objective": "preference", "data": data}
    dataset = huggingface.build(config).dataset
    assert len(dataset) == 3, "of one no answer is within the length"
    (ids, mask, labels), targets = dataset.batch(range(3))
    assert targets == ()
    assert [[words(row[row != IGNORED]) for row in pair] for pair in labels] == [
        ["w3 <end>", "w4 w5 <end>"],
        ["w9 <end>", "w10 <end>"],
        ["w12 <end>", "w13 <end>"],
    ]
    assert words(ids[1, 0, mask[1, 0].bool()]) == "<user> w6 <end> <assistant> w7 <end> <user> w8 <end> <assistant> w9"
    assert len(WORDS) == 44


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"beta": 0.0}, "beta must be positive, got 0.0"),
        ({"labelSmoothing": 0.5}, "labelSmoothing must be at least 0 and below 0.5, got 0.5"),
        ({"objective": "causal", "beta": 0.1}, "beta: expected only with objective preference"),
        ({"routerAuxLossCoef": 0.1}, "routerAuxLossCoef: not with objective preference"),
        ({"architecture": {"model_type": "distilbert"}}, "objective: transformers has no ForCausalLM of"),
        ({"data": {"kind": "text", "length": 8}}, "data: expected tokens and a mask [samples, 2, length] as inputs"),
        ({"data": {"shift": 1}}, "data.shift must be true or false, got 1"),
        ({"data": {"kind": "random", "long": 8}}, "data: unknown key 'long', expected some of kind, length, samples"),
        ({"data": {"kind": "preferences", "path": "x", "length": 8}}, "data.tokenizer: expected the"),
        ({"data": {"kind": "preferences", "packed": True}}, "data: unknown key 'packed', expected some of kind, path"),
        ({"data": {"kind": "chats"}}, "data.kind must be one of tokens, text, images, npz"),
    ],
)
def test_what_cannot_be_is_one_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as refused:
        load_task(ENTRYPOINT, {"architecture": architecture("gpt2"), "objective": "preference", **change})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": 1, "chosen": "w1", "rejected": "w2"},
        {"prompt": "w1", "chosen": "w1"},
        {"prompt": "w1", "chosen": [{"role": "user"}], "rejected": "w2"},
        [],
    ],
)
def test_what_is_no_pair_is_named_by_its_line(line: Any, tmp_path: Path) -> None:
    data = {"kind": "preferences", "path": file(tmp_path, [TALKS[0], line]), "length": 16}
    config = {"model": str(saved_model(tmp_path / "model")), "objective": "preference", "data": data}
    with pytest.raises(TaskError, match=r'pairs.jsonl line 2: expected {"prompt": ..., "chosen": ..., "rejected"'):
        load_task(ENTRYPOINT, config)


def test_adapters_come_before_the_reference(tmp_path: Path) -> None:
    config = {"architecture": architecture("llama"), "objective": "preference"}
    with pytest.raises(ValueError, match="lora: the task has a reference beside it"):
        with_lora(huggingface.build(config), rank=2)
    assert huggingface.build(config | {"lora": {"rank": 2}}).metrics.keys() >= {"reward_margin"}
