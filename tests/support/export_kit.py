"""Checkpoints of a job's stages in a store, for tests of the export."""

from collections.abc import Sequence

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointManifest
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.layer_file import encode
from bamboo_trainer.stage.stage import Stage
from checkpoint_kit import make_manifest


def write(store: CheckpointStore, stages: Sequence[Stage], step: int, attempt: str = "a") -> CheckpointManifest:
    place = CheckpointId(step, attempt)
    parts = {
        layer: store.write_part(place, layer, encode(state))
        for stage in stages
        for layer, state in stage.values.layer_states().items()
    }
    manifest = make_manifest(place, [parts[layer] for layer in sorted(parts)])
    store.commit(manifest)
    return manifest


def quiet(*_: object) -> None:
    """Do nothing, as a callback for progress."""
