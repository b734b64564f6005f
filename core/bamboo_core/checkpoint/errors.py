"""Errors of checkpoints. Each text is one sentence for a person, without credentials."""

from bamboo_core.storage.errors import StorageError


class CheckpointError(StorageError):
    """Error of a checkpoint that cannot be written, found or read."""


class CheckpointDamaged(CheckpointError):
    """Error of a checkpoint with a file that is missing or has other content than was written."""


class CheckpointExists(CheckpointError):
    """Error of an attempt whose id has already been committed with another manifest."""
