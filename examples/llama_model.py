"""The layers of the Llama family, and their values in the published layout: config.json and *.safetensors.

For llama.py beside this file. model_type may be llama, mistral or qwen2.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the layers need of a config.json, mostly by the names used there.

    frequencies: of the rotary embedding, head_dim / 2 of them. window: positions that attention sees; None: all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    eps: float
    std: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    frequencies: tuple[float, ...]
    window: int | None


def read_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """From the content of a config.json. ValueError, with `where` before it, for what the layers do not do."""
    try:
        return _architecture(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _architecture(config: Mapping[str, Any]) -> Architecture:
    family = config.get("model_type", "llama")
    expect(family in FAMILIES, f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
    expect(not config.get("quantization_config"), "quantized weights (quantization_config) are not supported")
    for key, only in (("hidden_act", "silu"), ("attention_dropout", 0), ("partial_rotary_factor", 1)):
        expect(config.get(key, only) == only, f"{key} must be {only!r}, got {config.get(key)!r}")
    width, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    expect(heads % kv_heads == 0, f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    head_dim = _whole(config, "head_dim", width // heads)
    if config.get("head_dim") is None:
        expect(width % heads == 0, f"hidden_size {width} must be a multiple of num_attention_heads {heads}")
    expect(head_dim % 2 == 0, f"head_dim must be even, got {head_dim}")
    bias = family == "llama" and _flag(config, "attention_bias")
    return Architecture(
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=width,
        intermediate_size=_whole(config, "intermediate_size"),
        blocks=_whole(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=_whole(config, "max_position_embeddings"),
        eps=_positive(config, "rms_norm_eps", 1e-6),
        std=_positive(config, "initializer_range", 0.02),
        tied=_flag(config, "tie_word_embeddings"),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
        frequencies=_frequencies(config, head_dim),
        window=_window(config, family),
    )


def _frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Newer files have rope_parameters, older ones rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    expect(isinstance(rope, Mapping), f"rope_parameters or rope_scaling must be an object, got {rope!r}")
    by_kind = any(isinstance(value, Mapping) for value in rope.values())
    expect(not by_kind, "rope_parameters of several kinds of layers are not supported")
    theta = _positive({"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10_000.0)
    plain = [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return tuple(plain)
    expect(kind in ("linear", "llama3"), f"rope scaling of type {kind!r} is not supported (default, linear, llama3)")
    factor = _positive(rope, "factor")
    if kind == "linear":
        return tuple(f / factor for f in plain)
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    expect(low < high, f"low_freq_factor {low} must be less than high_freq_factor {high}")
    original = _whole(rope, "original_max_position_embeddings")

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)  # within the context that the model first knew
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        return kept * frequency + (1 - kept) * frequency / factor

    return tuple(scaled(f) for f in plain)


def _window(config: Mapping[str, Any], family: str) -> int | None:
    used = _flag(config, "use_sliding_window") if family == "qwen2" else family == "mistral"
    return _whole(config, "sliding_window") if used and config.get("sliding_window") is not None else None


class Embedding(nn.Module):
    """int64 [batch, time] -> [batch, time, hidden_size]."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(a.vocab_size, a.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded


class Attention(nn.Module):
    """Causal, with rotary embeddings; several query heads share a key and a value."""

    frequencies: Tensor

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.head_dim, self.grouped = a.head_dim, a.heads != a.kv_heads
        self.q_proj = nn.Linear(a.hidden_size, a.heads * a.head_dim, bias=a.qkv_bias)
        self.k_proj = nn.Linear(a.hidden_size, a.kv_heads * a.head_dim, bias=a.qkv_bias)
        self.v_proj = nn.Linear(a.hidden_size, a.kv_heads * a.head_dim, bias=a.qkv_bias)
        self.o_proj = nn.Linear(a.heads * a.head_dim, a.hidden_size, bias=a.output_bias)
        frequencies = torch.tensor(a.frequencies, dtype=torch.float32, device="cpu")
        self.register_buffer("frequencies", frequencies, persistent=False)  # published layouts do not have it

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        query, key = _rotated(query, angles), _rotated(key, angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(a.hidden_size, a.intermediate_size, bias=a.mlp_bias)
        self.up_proj = nn.Linear(a.hidden_size, a.intermediate_size, bias=a.mlp_bias)
        self.down_proj = nn.Linear(a.intermediate_size, a.hidden_size, bias=a.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """[batch, time, hidden_size] -> the same shape."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(a.hidden_size, a.eps)
        self.self_attn = Attention(a)
        self.post_attention_layernorm = nn.RMSNorm(a.hidden_size, a.eps)
        self.mlp = Mlp(a)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """[batch, time, hidden_size] -> logits [batch, time, vocab_size]."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(a.hidden_size, a.eps)
        self.lm_head = nn.Linear(a.hidden_size, a.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def published_name(a: Architecture, index: int, name: str) -> str:
    """The published name of the tensor that layer `index` calls `name`. A tied head has none of its own."""
    if 0 < index <= a.blocks:
        return f"model.layers.{index - 1}.{name}"
    if name == "lm_head.weight":
        return "model.embed_tokens.weight" if a.tied else name
    return f"model.{name}"


def skeleton(a: Architecture, index: int) -> nn.Module:
    """The layer with parameters that have a shape and no values."""
    kind = Embedding if index == 0 else Block if index <= a.blocks else Head
    with torch.device("meta"):
        return kind(a)


class Weights:
    """The tensors of a published folder, by their published names; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.exists():
            with _opened(single) as file:
                self._files = dict.fromkeys(file.keys(), single)
            return
        if not index.exists():
            raise ValueError(f"model: {folder} has neither model.safetensors nor model.safetensors.index.json")
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ValueError(f"model: {index} must have a weight_map of tensor names to file names")
        self._files = {name: folder / file for name, file in named.items()}
        if missing := sorted(file for file in set(self._files.values()) if not file.is_file()):
            raise ValueError(f"model: {index} names {missing[0].name}, which is not there")

    def check(self, a: Architecture) -> None:
        """ValueError if a tensor of the model is missing, or one is there that these layers do not have."""
        names = {published_name(a, i, n) for i in range(a.blocks + 2) for n in skeleton(a, i).state_dict()}
        if missing := sorted(names - self._files.keys()):
            raise ValueError(f"model: {self.folder} has no tensor {missing[0]}")
        ignored = {"lm_head.weight"} if a.tied else set()
        strange = sorted(n for n in self._files.keys() - names - ignored if not n.endswith("rotary_emb.inv_freq"))
        if strange:
            raise ValueError(f"model: {self.folder} has the tensor {strange[0]}, which these layers do not have")

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """In fp32, on the CPU."""
        path = self._files[name]
        with _opened(path) as file:
            if name not in file.keys():  # noqa: SIM118
                raise ValueError(f"{path} does not have the tensor {name} that the index says it has")
            found: Tensor = file.get_tensor(name)
        if found.shape != shape or found.dtype not in FLOATS:
            raise ValueError(
                f"{name} in {path} is {found.dtype} {list(found.shape)}, "
                f"expected {list(shape)} in float32, bfloat16 or float16"
            )
        return found.to(torch.float32, copy=True)  # a copy, not a view of the file


def make_layer(a: Architecture, weights: Weights | None, index: int) -> nn.Module:
    """With the published values, or with random ones: matrices normal, biases 0, norms 1."""
    layer = skeleton(a, index)

    def value(name: str, shape: torch.Size) -> Tensor:
        if weights is not None:
            return weights.tensor(published_name(a, index, name), shape)
        if len(shape) >= 2:
            return torch.empty(shape).normal_(std=a.std)
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)

    layer.load_state_dict({n: value(n, empty.shape) for n, empty in layer.state_dict().items()}, assign=True)
    return layer


def expect(holds: bool, otherwise: str) -> None:
    """ValueError, a sentence for the user, unless it holds."""
    if not holds:
        raise ValueError(otherwise)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [batch, heads, time, head_dim]; element i and element i + head_dim / 2 turn by angles[time, i]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value: Any = default if config.get(key) is None else config[key]
    expect(type(value) is int and value >= 1, f"{key} must be a whole number of at least 1, got {value!r}")
    return int(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    expect(value is None or type(value) is bool, f"{key} must be true or false, got {value!r}")
    return bool(value)


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value: Any = default if config.get(key) is None else config[key]
    expect(type(value) in (int, float) and value > 0, f"{key} must be a positive number, got {value!r}")
    return float(value)
