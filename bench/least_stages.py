"""The fewest stages that large models fit on, for docs/models.md: `python bench/least_stages.py`.

AdamW in fp32, products in bf16, checkpointed blocks, microbatches of one sample of 2048 tokens; the head keeps casts of
its input and weights, and logarithms for the loss. A tenth of a card is left to torch.
"""

from dataclasses import replace
from typing import Final, NamedTuple

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.planning.profile import Layer, ModelFigures, Network
from bamboo_core.planning.steps.fitting_split import fitting_split

TOKENS, VOCABULARY, MICROBATCHES = 2048, 32_000, 256
USABLE: Final = 0.9
MOST: Final = 80  # stages


class Model(NamedTuple):
    """A model. block: parameters of one block."""

    name: str
    width: int
    blocks: int
    block: int
    cards: tuple[int, ...]  # GiB

    @property
    def figures(self) -> ModelFigures:
        sizes = [VOCABULARY * self.width, *[self.block] * self.blocks, VOCABULARY * self.width]
        boundary = 4 * TOKENS * self.width
        keeps = [0] * (1 + self.blocks) + [boundary // 2 + 2 * sizes[-1] + 4 * TOKENS * VOCABULARY]
        layers = tuple(
            Layer(
                forward=size * 1e-12,
                backward=3e-12 * size,
                parameters=4 * size,
                optimizer=8 * size,
                gradients=4 * size,
                activations=kept,
                boundary=boundary,
            )
            for size, kept in zip(sizes, keeps, strict=True)
        )
        return ModelFigures(layers=layers, network=Network(flow=3e9, machine=3e9))


MODELS: Final = (
    Model("1.3B", 2048, 24, 12 * 2048**2, (16,)),
    Model("7B", 4096, 32, 4 * 4096**2 + 3 * 4096 * 11008, (24, 48, 80)),
    Model("13B", 5120, 40, 4 * 5120**2 + 3 * 5120 * 13824, (24, 48, 80)),
    Model("70B", 8192, 80, 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672, (80, 141)),
)


def job(pipelines: int, mode: RedundancyMode) -> JobSpec:
    document = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "large"},
        "spec": {
            "task": {"entrypoint": "large:build"},
            "training": {"steps": 1, "globalBatchSize": MICROBATCHES, "microBatchSize": 1, "precision": "bf16"},
            "topology": {"stages": 1, "pipelines": pipelines},
            "redundancy": {"mode": mode.value},
        },
    }
    return parse_manifest(document)


def least(model: Model, spec: JobSpec, card: int) -> str:
    memory = int(USABLE * card * 2**30)
    for stages in range(1, min(MOST, model.blocks + 2) + 1):
        if fitting_split(model.figures, replace(spec, topology=replace(spec.topology, stages=stages)), memory):
            return f"{spec.topology.pipelines} x {stages}"
    return "none"


def main() -> None:
    jobs = {
        "A loss goes back to the checkpoint": job(1, RedundancyMode.NONE),
        "Losses survived, two pipelines": job(2, RedundancyMode.NONE),
        "Losses survived, one pipeline": job(1, RedundancyMode.REPLICAS),
    }
    print("| Model, GiB of a card |", " | ".join(jobs), "|")
    print("| --- " * (1 + len(jobs)) + "|")
    for model in MODELS:
        for card in model.cards:
            print(f"| {model.name}, {card} |", " | ".join(least(model, one, card) for one in jobs.values()), "|")


if __name__ == "__main__":
    main()
