"""Export of checkpoints and weights as one state dict, which the trainer writes in its own process."""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from bamboo.jobs.errors import BambooError
from bamboo.local.trainer_calls.trainer_process import missing_packages

EXPORTER: Final = "bamboo_trainer.checkpoint"
ExportFormat = Literal["safetensors", "huggingface", "peft"]


async def export(
    url: str,
    output: Path,
    form: ExportFormat,
    *,
    step: int | None,
    task_config: Mapping[str, Any],
    force: bool,
) -> Path:
    """Write a checkpoint or a folder of weights as one state dict, and return its path.

    task_config: the config of the job's task. Raises BambooError.
    """
    if missing := missing_packages():
        raise BambooError(f"an export needs {missing}, not installed here")
    arguments = ["--format", form, "--output", str(output), "--task-config", json.dumps(task_config), "--quiet"]
    arguments += ["--step", str(step)] if step is not None else []
    arguments += [*(["--force"] if force else []), "--", url]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", EXPORTER, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, printed = await process.communicate()
    finally:
        if process.returncode is None:  # cancelled: the process removes its partial output
            process.terminate()
            await process.wait()
    if process.returncode:
        problem = printed.decode(errors="replace").strip().removeprefix("bamboo: ")
        raise BambooError(problem or f"the export ended with code {process.returncode}")
    return output
