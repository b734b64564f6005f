"""What can go wrong with checkpoints. Each text is one sentence for a person, and holds no credential."""

from bamboo_core.storage.errors import StorageError


class CheckpointError(StorageError):
    """A checkpoint cannot be written, found or read."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written."""


class CheckpointExists(CheckpointError):
    """An attempt of this id has been committed before, with another manifest."""
