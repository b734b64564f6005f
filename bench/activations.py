"""When activations would be better moved to host memory than recomputed, by arithmetic: Llama models on H100s.

    python bench/activations.py

One sequence is a microbatch, layers compute in bf16 with attention that keeps no scores, and `topology.lookahead` is 0,
so stage s of P keeps P - s microbatches. What of it finds no room beside parameters, optimizer and a replica is either
recomputed (`checkpointed` layers, one more forward, layers balanced by cost) or copied out and back, both ways at once.
"""

import math
from dataclasses import dataclass

FLOPS = 0.4 * 989e12  # of an H100, two fifths of its bf16 peak
LINK, SHARED = 50e9, 25e9  # bytes a second each way over PCIe 5: alone, and with eight GPUs at one host's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """width of a feed-forward layer: `inner` times that of the model. groups: heads that share keys and values. room:
    bytes of 80 GB that are left for activations.
    """

    name: str
    layers: int
    width: int
    groups: int
    room: float
    inner: float = 3.5

    @property
    def kept(self) -> float:
        """Bytes of a token and layer: of attention its input, queries, keys, values and output, each norm's input and
        output, and four of the feed-forward layer.
        """
        return 2 * self.width * (6 + 2 / self.groups + 4 * self.inner)

    def seconds(self, tokens: int) -> float:
        """Of a token's forward and backward in a layer; attention is causal."""
        weights = self.width**2 * (2 + 2 / self.groups + 3 * self.inner)
        return (6 * weights + 6 * tokens * self.width) / FLOPS


# 8 stages and 28 bytes a parameter; 40 stages and 20, as the replica's optimizer state is in host memory.
MODELS = (
    Model(name="8B", layers=32, width=4096, groups=4, room=45e9),
    Model(name="70B", layers=80, width=8192, groups=8, room=40e9),
)


def main() -> None:
    print("model tokens  kept GB  recomputed  slower  link alone  link shared  host GB")
    for model in MODELS:
        for tokens in (4096, 8192, 16384, 32768):
            print(line(model, tokens))


def line(model: Model, tokens: int) -> str:
    kept = model.layers * tokens * model.kept  # of the first stage, whatever the number of stages
    fits = min(1.0, model.room / kept)
    recomputed = 1 - fits + fits * math.log(fits)  # of all layers: stages keep less and less
    link, shared = ((1 - fits) * model.kept / rate / model.seconds(tokens) for rate in (LINK, SHARED))
    return (
        f"{model.name:>5} {tokens:6} {kept / 1e9:8.0f} {recomputed:10.0%} {recomputed / 3:8.0%} {link:10.0%} "
        f"{shared:12.0%} {(kept - fits * kept) / 1e9:8.0f}"
    )


if __name__ == "__main__":
    main()
