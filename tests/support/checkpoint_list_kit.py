"""Checkpoints as lists of what was found, for decisions on them."""

from dataclasses import replace

from bamboo_core.checkpoint.found import Found, FoundState
from bamboo_core.checkpoint.layout import CheckpointId
from checkpoint_kit import EPOCH, complete


def unfinished(step, id="u", modified=EPOCH):
    return Found(
        attempt=CheckpointId(step, id), state=FoundState.UNFINISHED, modified=modified, reason="it was never committed"
    )


def damaged(step, id="d", **options):
    return replace(complete(step, id, **options), state=FoundState.DAMAGED, reason="layer-00001.safetensors is missing")


def torn(step, id="t"):
    return Found(
        attempt=CheckpointId(step, id), state=FoundState.DAMAGED, reason="the manifest cannot be read", modified=EPOCH
    )


def unreadable(step, id="r"):
    return Found(attempt=CheckpointId(step, id), state=FoundState.UNREADABLE, reason="permission denied")
