"""Adapters exported to PEFT and read from it: the same logits there, and continued training here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.__main__ import main as export
from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.training import TrainingConfig
from export_kit import write
from manifest_kit import bamboojob, training
from reference import train
from stage_kit import chain, state_of
from transformers_kit import ENTRYPOINT, FAMILIES, LENGTH, transformers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of PEFT and transformers
PLAIN = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=2, micro_batch_size=2)
IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH)


def saved_llama(folder: Path) -> Path:
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**FAMILIES["llama"], pad_token_id=0)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("llama"))


def config_of(model: Path, lora: dict[str, Any], **more: Any) -> dict[str, Any]:
    data = {"length": LENGTH, "samples": 64}
    return {"model": str(model), "data": data, "learningRate": 1e-2, "lora": lora, **more}


def manifest(config: dict[str, Any], folder: Path) -> str:
    task, path = {"entrypoint": ENTRYPOINT, "config": config}, folder / "job.yaml"
    path.write_text(yaml.safe_dump(bamboojob(task=task, training=training(2, 4, 2), topology={"stages": 2})))
    return str(path)


def exported(state: dict[str, Tensor], config: dict[str, Any], form: str, folder: Path) -> Path:
    kept, out = folder / "kept", folder / form
    kept.mkdir(exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in state.items()}, kept / "model.safetensors")
    options = ["--format", form, "--output", str(out), "--quiet", "--job", manifest(config, folder)]
    assert export([*options, "--", str(kept)]) == 0
    return out


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def loaded_by_peft(base: nn.Module, folder: Path) -> nn.Module:
    import peft  # takes a second, which only the process with these tests pays

    model: nn.Module = peft.PeftModel.from_pretrained(base, folder)
    return model


@pytest.mark.parametrize(
    ("auto", "lora", "more"),
    [
        ("AutoModelForCausalLM", {"rank": 3, "alpha": 8}, {}),
        ("AutoModelForCausalLM", {"rank": 2, "targets": ["*.1.*proj", "*lm_head"], "dropout": 0.1}, {}),
        ("AutoModelForSequenceClassification", {"rank": 4}, {"objective": "sequence", "labels": 3}),
    ],
)
def test_what_was_trained_has_the_same_logits_in_peft(
    auto: str, lora: dict[str, Any], more: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    """The adapter is loaded beside the model, and merged into it. A head for labels is trained and exported, too."""
    config = config_of(llama, lora, **more)
    _, state = train(load_task(ENTRYPOINT, config), PLAIN, 2)
    base = getattr(transformers, auto).from_pretrained(llama, num_labels=3)
    before = logits(base)
    adapted = loaded_by_peft(base, exported(state, config, "peft", tmp_path))
    merged = getattr(transformers, auto).from_pretrained(exported(state, config, "huggingface", tmp_path))
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(merged), before, atol=1e-4)
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["r"]) == (str(llama), lora["rank"])
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert all(".lora_A." in name or ".lora_B." in name or name.endswith("model.score.weight") for name in written)


def saved_by_peft(llama: Path, folder: Path, **changes: Any) -> nn.Module:
    """Save an adapter by PEFT, with random values of two ranks and two scales."""
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    given = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 6, **changes}
    model: nn.Module = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **given))
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
        {"use_rslora": True, "modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_of_peft_goes_on_where_it_was(changes: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    theirs = saved_by_peft(llama, tmp_path / "given", **changes)
    config = config_of(llama, {"adapter": str(tmp_path / "given")})
    task = load_task(ENTRYPOINT, config)
    state = state_of(chain(task, [(0, 3), (3, 5)]))
    again = transformers.AutoModelForCausalLM.from_pretrained(llama)
    back = loaded_by_peft(again, exported(state, config, "peft", tmp_path))
    assert torch.equal(logits(back), logits(theirs))
    given, written = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("given", "peft"))
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in given)
    _, after = train(task, PLAIN, 1)
    changed = {name for name in after if not torch.equal(after[name], state[name])}
    assert len(changed) == len(given), "just what PEFT has saved is trained"


def adapter_task(folder: Path) -> dict[str, Any]:
    """Return a task that continues the training of an adapter of PEFT."""
    saved_by_peft(saved_llama(folder / "llama"), folder / "adapter", lora_dropout=0.1)
    return {"entrypoint": ENTRYPOINT, "config": config_of(folder / "llama", {"adapter": str(folder / "adapter")})}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "adapter_config.json has use_dora: True, expected a plain LoRA adapter"),
        ({"bias": "lora_only"}, "has bias: 'lora_only', expected a plain LoRA adapter"),
        ({"peft_type": "IA3"}, "must have peft_type LORA, got 'IA3'"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights: 'pissa', expected a plain"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number, got '8'"),
    ],
)
def test_another_adapter_than_a_plain_one_is_refused(
    changes: dict[str, Any], said: str, llama: Path, tmp_path: Path
) -> None:
    saved_by_peft(llama, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(TaskError, match=r"task\.config: adapter: ") as refused:
        load_task(ENTRYPOINT, config_of(llama, {"adapter": str(tmp_path)}))
    assert said in str(refused.value)


def test_a_folder_that_does_not_fit_is_refused(llama: Path, tmp_path: Path) -> None:
    def refused(lora: dict[str, Any], said: str) -> None:
        with pytest.raises(TaskError, match=said):
            load_task(ENTRYPOINT, config_of(llama, lora))

    refused({"adapter": str(tmp_path)}, "has no adapter_config.json, as PEFT's save_pretrained writes it")
    saved_by_peft(llama, tmp_path)
    refused({"adapter": str(tmp_path), "rank": 4}, "lora: rank: not with adapter, which says it")
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    save_file({name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()}, path)
    refused({"adapter": str(tmp_path)}, r"has one of model\.layers\.7\.\S+, which is no nn.Linear of the model")
    save_file({name: tensor for name, tensor in tensors.items() if name != first.replace("lora_A", "lora_B")}, path)
    refused({"adapter": str(tmp_path)}, r"has no base_model\.\S+\.lora_B\.weight")


def test_weights_without_adapters_are_no_peft_folder(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model": str(llama), "data": {"length": LENGTH}}
    state = state_of(chain(load_task(ENTRYPOINT, config), [(0, 5)]))
    with pytest.raises(AssertionError):
        exported(state, config, "peft", tmp_path)
    assert "the weights have no adapters of bamboo_trainer.lora" in capsys.readouterr().err


def test_an_adapter_of_a_tied_head_is_not_merged_but_kept_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = transformers.LlamaConfig(**FAMILIES["llama"], pad_token_id=0, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(made).save_pretrained(tmp_path / "tied")
    config = config_of(tmp_path / "tied", {"rank": 2, "targets": ["*lm_head"]})
    stages = chain(load_task(ENTRYPOINT, config), [(0, 3), (3, 5)])
    write(CheckpointStore(str(tmp_path / "kept")), stages, 0)
    options = ["--quiet", "--job", manifest(config, tmp_path)]
    of = ["--output", str(tmp_path / "out"), "--", str(tmp_path / "kept")]
    assert export([*options, "--format", "huggingface", *of]) == 1
    assert "is tied to another layer's weight, so its adapter cannot be merged" in capsys.readouterr().err
    assert export([*options, "--format", "peft", *of]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    expected = logits(base)
    assert torch.equal(logits(loaded_by_peft(base, tmp_path / "out")), expected), "it begins with zeros"
