"""What can go wrong with checkpoints. Each text is one sentence for a person, and holds no credential."""


class CheckpointError(Exception):
    """A checkpoint cannot be written, found or read."""


class StoreUnavailable(CheckpointError):
    """The store does not do what it is asked: unreachable, too slow, full, or it denies permission."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written."""


class CheckpointExists(CheckpointError):
    """The same attempt has been committed with another manifest."""
