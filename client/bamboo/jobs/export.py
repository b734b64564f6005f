"""Checkpoints and weights as one state dict, which the trainer writes in a process of its own."""

import asyncio
import sys
from pathlib import Path
from typing import Final, Literal

from bamboo.jobs.errors import BambooError
from bamboo.local.trainer_calls.trainer_process import missing_packages

EXPORTER: Final = "bamboo_trainer.checkpoint"
ExportFormat = Literal["safetensors", "torch", "dcp", "huggingface", "peft"]


def export_arguments(
    url: str,
    output: Path,
    form: str,
    *,
    step: int | None = None,
    job: Path | None = None,
    model: Path | None = None,
    ema: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> list[str]:
    """What the exporter is called with."""
    arguments = ["--format", form, "--output", str(output), *(["--force"] if force else [])]
    arguments += [*(["--step", str(step)] if step is not None else []), *(["--quiet"] if quiet else [])]
    arguments += [*(["--job", str(job)] if job else []), *(["--model", str(model)] if model else [])]
    return [*arguments, *(["--ema"] if ema else []), "--", url]


async def export(
    url: str,
    output: Path,
    form: ExportFormat,
    *,
    step: int | None,
    job: Path | None = None,
    ema: bool = False,
    force: bool = False,
) -> Path:
    """Writes a checkpoint or a folder of weights, and returns where. Raises BambooError."""
    if missing := missing_packages():
        raise BambooError(f"an export needs {missing}, not installed here")
    arguments = export_arguments(url, output, form, step=step, job=job, ema=ema, force=force, quiet=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", EXPORTER, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:  # this was cancelled; what is half written is removed
            process.terminate()
            await process.wait()
    if process.returncode:
        raise BambooError(said.decode(errors="replace").strip() or f"the export ended with code {process.returncode}")
    return output
