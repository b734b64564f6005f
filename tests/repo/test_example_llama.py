"""examples/llama.py and its two tools: a published folder is read, trained pipelined, and written again."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import paced
from bamboo_core.job.manifest import load_manifest
from bamboo_operator.manifests.worker_pod import JobMeta, WorkerPodSettings, template_problems, worker_pod
from bamboo_trainer import reference
from bamboo_trainer.loading import load_task
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig
from folders import TASK_PATH

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, CONTEXT, WIDTH, INNER, VOCABULARY, BLOCKS = 3, 8, 16, 24, 61, 3
TRAINING = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=4, micro_batch_size=2)

# As a config.json has it: 4 query heads of 4 share 2 keys and values.
ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Of a block with 4 query heads and 2 keys and values; the shape of each tensor.
BLOCK = {
    "input_layernorm.weight": (WIDTH,),
    "mlp.down_proj.weight": (WIDTH, INNER),
    "mlp.gate_proj.weight": (INNER, WIDTH),
    "mlp.up_proj.weight": (INNER, WIDTH),
    "post_attention_layernorm.weight": (WIDTH,),
    "self_attn.k_proj.weight": (8, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, 16),
    "self_attn.q_proj.weight": (16, WIDTH),
    "self_attn.v_proj.weight": (8, WIDTH),
}
QWEN2_BIASES = {"self_attn.q_proj.bias": (16,), "self_attn.k_proj.bias": (8,), "self_attn.v_proj.bias": (8,)}


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def export() -> ModuleType:
    import export_llama

    return export_llama


@pytest.fixture
def tokenize() -> ModuleType:
    import tokenize_text

    return tokenize_text


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Counts up, with a step that changes now and then: something that can be learned."""
    path = tmp_path / "tokens.npy"
    ids = np.cumsum(1 + np.arange(400) // 50) % VOCABULARY
    np.save(path, ids.astype(np.uint16))
    return path


def published(**changes: Any) -> dict[str, Tensor]:
    """Random tensors by the names that are published, in bf16."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    block = BLOCK | (QWEN2_BIASES if changes.get("model_type") == "qwen2" else {})
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(BLOCKS) for name, shape in block.items()}
    if not changes.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def publish(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**ARCHITECTURE, "torch_dtype": "bfloat16", **changes}))
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    where = {name: f"model-{1 + n % shards:05d}-of-{shards:05d}.safetensors" for n, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def task_of(tokens: Path, /, **config: Any) -> Task:
    base: dict[str, Any] = {"tokens": str(tokens), "context": CONTEXT, "learningRate": 0.01, "warmupSteps": 2}
    return load_task("llama:build", base | config)


def save_as_workers_do(task: Task, folder: Path) -> Path:
    """Untrained, split in two stages."""
    folder.mkdir()
    stages = [(0, 2), (2, len(task.layers))]
    for number in range(len(stages)):
        tensors = build_stage(task, number, stages, TRAINING).values.state_tensors()
        save_file(tensors, folder / f"stage-{number:03d}.safetensors")
    return folder


def test_it_trains_pipelined_as_in_one_process_and_after_a_loss(
    tokens: Path, tmp_path: Path, export: ModuleType
) -> None:
    """With tied embeddings and checkpointed blocks; then the trained weights go out, and in again."""
    config = {"architecture": {**ARCHITECTURE, "tie_word_embeddings": True}, "checkpoint": True, "steps": STEPS}
    task = task_of(tokens, **config)
    document = yaml.safe_load((EXAMPLES / "llama.yaml").read_text())
    spec = document["spec"]
    spec["task"]["config"] = config | {
        "tokens": str(tokens),
        "context": CONTEXT,
        "learningRate": 0.01,
        "warmupSteps": 2,
    }
    spec["training"] = {"steps": STEPS, "globalBatchSize": 8, "microBatchSize": 2, "seed": 0}
    spec |= {"topology": {"stages": 2}, "redundancy": {"mode": "LazyForward"}}
    job, slow, mark, kept = (tmp_path / name for name in ("llama.yaml", "slow.yaml", "slow", "kept"))
    job.write_text(yaml.safe_dump(document))
    slow.write_text(yaml.safe_dump(paced.slowed(document, mark, since=1)))  # the loss comes before the end
    mark.touch()
    done = subprocess.run(
        [sys.executable, "-m", "bamboo", "run", slow, "--preempt", "at:1:1", "--verify", "--json", "--output", kept],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": TASK_PATH},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert (summary["committed"], summary["preemptions"], summary["bit_equal"]) == (STEPS, 1, True)
    _, expected = reference.train(task, TRAINING, STEPS)
    trained = export.trained(kept / "weights")
    assert trained.keys() == expected.keys()
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)

    export.main([str(job), str(kept / "weights"), str(tmp_path / "out")])
    again = task_of(tokens, model=str(tmp_path / "out"))
    for index in range(len(task.layers)):
        for name, tensor in build_layer(again, 0, index).state_dict().items():
            assert torch.equal(tensor, trained[f"layers.{index}.{name}"]), name


def test_every_worker_gets_the_modules_and_the_data() -> None:
    job = load_manifest(EXAMPLES / "llama.yaml")
    settings = WorkerPodSettings(coordinator_url="ws://operator:8765/job", image="trainer:1")
    pod = worker_pod(job, JobMeta(uid="u"), 0, job.node_pools[0], settings)
    (container,) = pod["spec"]["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert template_problems(job) == []
    assert mounted.keys() == {volume["name"] for volume in pod["spec"]["volumes"]} >= {"task", "data"}
    assert {"name": "PYTHONPATH", "value": mounted["task"]} in container["env"]
    assert all(Path(job.task.config[key]).is_relative_to(mounted["data"]) for key in ("model", "tokens"))
    assert job.training.steps == job.task.config["steps"]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"model_type": "qwen2"}, {"model_type": "mistral", "sliding_window": 8}],
    ids=["llama", "tied", "qwen2", "mistral"],
)
def test_what_was_published_is_read_and_written_bit_by_bit(
    changes: dict[str, Any], shards: int, tokens: Path, tmp_path: Path, export: ModuleType
) -> None:
    given = published(**changes)
    folder = publish(tmp_path / "model", given, shards, **changes)
    config = {"tokens": str(tokens), "model": str(folder), "context": CONTEXT}
    weights = save_as_workers_do(load_task("llama:build", config), tmp_path / "weights")
    out = tmp_path / "out"
    assert export.export(config, weights, out, "bfloat16") == len(given)
    written = load_file(out / "model.safetensors")
    assert written.keys() == given.keys()
    assert all(written[name].dtype == torch.bfloat16 and torch.equal(written[name], given[name]) for name in given)
    described = json.loads((out / "config.json").read_text())
    assert described["torch_dtype"] == "bfloat16"
    assert described.items() >= {**ARCHITECTURE, **changes}.items()
    assert (out / "tokenizer.json").read_text() == "{}"

    export.export(config, weights, tmp_path / "exact", "float32")
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    assert all(torch.equal(exact[name], given[name].float()) for name in given)
    assert json.loads((tmp_path / "exact" / "config.json").read_text())["torch_dtype"] == "float32"


def test_attention_is_what_it_is_by_hand(tokens: Path) -> None:
    """Head by head, with rotations as complex numbers: two query heads share a key and a value."""
    task = task_of(tokens, architecture={**ARCHITECTURE, "initializer_range": 0.5})
    attention = build_layer(task, 0, 1).get_submodule("self_attn")
    x = torch.randn(CONTEXT, WIDTH, generator=torch.Generator().manual_seed(0))
    query, key, value = ((x @ attention.get_parameter(f"{name}_proj.weight").T).detach() for name in "qkv")
    angles = torch.outer(torch.arange(CONTEXT), torch.tensor([1.0, 500.0**-0.5]))  # heads of 4 have two frequencies

    def turned(part: Tensor) -> Tensor:
        return torch.complex(part[:, :2], part[:, 2:]) * torch.polar(torch.ones_like(angles), angles)

    mixed = []
    for head in range(4):
        own, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        scores = (turned(query[:, own]) @ turned(key[:, shared]).conj().T).real / 2
        seen = scores.masked_fill(torch.ones(CONTEXT, CONTEXT).triu(1).bool(), -torch.inf)
        mixed.append(seen.softmax(-1) @ value[:, shared])
    expected = torch.cat(mixed, dim=1) @ attention.get_parameter("o_proj.weight").T
    torch.testing.assert_close(attention(x[None])[0], expected)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architecture": ARCHITECTURE, "contxt": 8}, "unknown key 'contxt'"),
        ({"architecture": ARCHITECTURE, "context": 33}, "context must be at most the model's 32 positions, got 33"),
        ({"architecture": ARCHITECTURE, "context": "8"}, "context must be of type int, got '8'"),
        ({"architecture": ARCHITECTURE, "learningRate": 0}, "learningRate must be positive"),
        ({"architecture": ARCHITECTURE, "tokenType": "uint8"}, "tokenType must be uint16 or uint32, got 'uint8'"),
        ({"architecture": ARCHITECTURE, "tokenType": "uint32"}, r"has uint16, but tokenType is uint32"),
        ({"architecture": ARCHITECTURE, "tokens": "/nowhere.npy"}, "cannot read /nowhere.npy: No such file"),
        ({"architecture": ARCHITECTURE, "tokens": "/nowhere.bin"}, "tokenType must say of which type the ids are"),
        ({}, "expected exactly one of model and architecture"),
        ({"model": "/nowhere"}, "cannot read /nowhere/config.json: No such file"),
    ],
)
def test_a_wrong_config_is_told_in_a_sentence(config: dict[str, Any], said: str, tokens: Path) -> None:
    with pytest.raises(TaskError, match=rf"task\.config: .*{said}"):
        task_of(tokens, **config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma"}, "model_type must be one of llama, mistral, qwen2, got 'gemma'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"hidden_size": None}, "hidden_size must be a whole number of at least 1, got None"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"hidden_size": 18}, "hidden_size 18 must be a multiple of num_attention_heads 4"),
        ({"head_dim": 5}, "head_dim must be even, got 5"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling of type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, got None"),
        ({"rope_scaling": {**LLAMA3}}, "original_max_position_embeddings must be a whole number"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters of several kinds of layers are not supported"),
        ({"model_type": "mistral", "sliding_window": 4}, "context must be at most the model's 4 positions, got 8"),
        ({"vocab_size": 65_537}, r"tokens\.npy has uint16, too small for a vocabulary of 65537"),
    ],
)
def test_a_model_that_the_layers_are_not_is_refused_by_name(changes: dict[str, Any], said: str, tokens: Path) -> None:
    with pytest.raises(TaskError, match=said):
        task_of(tokens, architecture={**ARCHITECTURE, **changes})


def test_a_folder_that_does_not_fit_is_refused_by_name(tokens: Path, tmp_path: Path) -> None:
    def refused(name: str, tensors: Mapping[str, Tensor], said: str, shards: int = 1, without: str = "") -> None:
        folder = publish(tmp_path / name, tensors, shards)
        if without:
            (folder / without).unlink()
        with pytest.raises(TaskError, match=said):
            build_layer(task_of(tokens, model=str(folder)), 0, 1)

    whole = published()
    name = "model.layers.0.self_attn.q_proj.weight"
    lacking = {n: t for n, t in whole.items() if n != name}
    refused("lacking", lacking, f"lacking has no tensor {name}")
    refused(
        "strange", {**whole, "model.layers.0.q_norm.weight": torch.ones(4)}, "has the tensor .*q_norm.weight, which"
    )
    refused(
        "shape", {**whole, name: torch.ones(16, 15)}, rf"{name} in .* is torch.float32 \[16, 15\], expected \[16, 16\]"
    )
    refused("type", {**whole, name: torch.ones(16, 16, dtype=torch.int8)}, f"{name} in .* is torch.int8")
    refused(
        "empty", whole, "has neither model.safetensors nor model.safetensors.index.json", without="model.safetensors"
    )
    shard = "model-00002-of-00002.safetensors"
    refused("shard", whole, f"index.json names {shard}, which is not there", shards=2, without=shard)
    broken = publish(tmp_path / "broken", whole)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(TaskError, match=r"cannot read .*broken/model\.safetensors"):
        task_of(tokens, model=str(broken))


def test_texts_become_tokens(tmp_path: Path, tokenize: ModuleType) -> None:
    """With bytes as tokens; the tokenizers library is not needed for it."""
    (tmp_path / "a.txt").write_bytes("né\r\n".encode())
    (tmp_path / "b.txt").write_text("x\n\n  \nyz\n")
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]

    def written(name: str, lines: bool) -> np.ndarray[Any, Any]:
        batches = tokenize.batched(tokenize.documents(texts, lines), 2)
        ids = tokenize.token_batches(lambda batch: [list(text.encode()) for text in batch], batches, 256)
        count = tokenize.write_tokens(tmp_path / name, np.dtype("<u2"), ids)
        found = np.load(tmp_path / name)
        assert len(found) == count
        return found

    assert written("files.npy", False).tolist() == [*"né\r\n".encode(), 256, *b"x\n\n  \nyz\n", 256]
    assert written("lines.npy", True).tolist() == [*"né".encode(), 256, *b"x", 256, *b"yz", 256]
    assert not list(tmp_path.glob("*.partial"))
    many = tokenize.write_tokens(tmp_path / "many.npy", np.dtype("<u4"), ([i] * 1000 for i in range(1000)))
    assert many == 1_000_000
    assert np.load(tmp_path / "many.npy", mmap_mode="r")[-1] == 999
