"""Errors of checkpoints. Each text is one sentence for a person, without credentials."""

from bamboo_core.storage.errors import StorageError


class CheckpointError(StorageError):
    """A checkpoint cannot be written, found or read."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing or has other content than was written."""


class CheckpointExists(CheckpointError):
    """An attempt with this id has already been committed with another manifest."""
