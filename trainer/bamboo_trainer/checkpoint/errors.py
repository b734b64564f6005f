"""Errors of restoring a checkpoint, and of an export."""

from bamboo_core.checkpoint.layout import CheckpointId


class RestoreError(Exception):
    """Error of a stage that cannot begin with a checkpoint. damaged: it never can."""

    def __init__(self, checkpoint: CheckpointId, message: str, damaged: bool) -> None:
        super().__init__(message)
        self.checkpoint, self.damaged = checkpoint, damaged


class ExportError(Exception):
    """Error of an output that cannot be written; the text is a sentence."""
