"""Layers and workers for grids."""

from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.plan import Peer


def peer(name: str, zone: str = "") -> Peer:
    return Peer(worker=name, host="h", port=1, zone=zone)


def training(microbatches: int) -> TrainingSpec:
    return TrainingSpec(steps=1, global_batch_size=microbatches, micro_batch_size=1)
