"""A stage's final weights, as a file in a folder that all workers see."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from bamboo.control.protocol import Save
from bamboo_trainer.stage.stage import Stage


class SaveError(Exception):
    """The file cannot be written; the text is a sentence for the user."""


def save_weights(parts: Sequence[Stage], request: Save, worker: str) -> None:
    """Of all parts of a stage. The file is there as a whole or not at all. Raises SaveError."""
    file = Path(request.path) / f"stage-{request.stage:03d}.safetensors"
    partial = file.with_name(f".{file.name}.{worker}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor for stage in parts for name, tensor in stage.state_tensors().items()}, str(partial))
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # what keeps it from being written may keep it from being removed
            partial.unlink(missing_ok=True)
        raise SaveError(f"cannot write {file}: {error}") from error
