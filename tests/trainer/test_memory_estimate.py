"""The estimate of a stage's memory counts what it holds."""

from dataclasses import replace

from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.stage.stage import build_stage
from manifest_kit import bamboojob, training
from precision_kit import build
from stage_kit import ROUNDED, one_step

UNCLIPPED = replace(ROUNDED, max_gradient_norm=None)


def test_the_estimate_counts_what_a_stage_holds() -> None:
    document = bamboojob(
        task={"entrypoint": "m:build"},
        training=training(3, 8, 2, precision="bf16", parameterPrecision="bf16"),
        topology={"stages": 1},
    )
    task = build({})
    sizes = measure(task, parse_manifest(document))
    stage = build_stage(task, 0, [(0, 4)], UNCLIPPED)
    one_step([stage], 0, UNCLIPPED)
    assert sum(size.bytes.parameters for size in sizes) == sum(
        tensor.nbytes for _, tensor in stage.values.parameters.named()
    )
    assert sum(size.bytes.optimizer for size in sizes) == sum(
        tensor.nbytes for _, tensor in stage.values.optimizer.named()
    )
    assert sum(size.bytes.gradients for size in sizes) == 4 * sum(p.numel() for p in stage.values.parameters.trained())
