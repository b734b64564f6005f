"""`python -m bamboo_trainer.checkpoint`, the process of `bamboo export`: the `bamboo` command itself needs no torch."""

import argparse
import json
import signal
import sys
from pathlib import Path

from bamboo_core import standard_streams
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from bamboo_core.storage.bounded import StorageError
from bamboo_core.text import count, size
from bamboo_trainer.checkpoint.export import export, task_config
from bamboo_trainer.checkpoint.sources import Checkpoint, StateSource, open_source
from bamboo_trainer.data.tokenizing import ProgressLine


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bamboo_trainer.checkpoint")
    parser.add_argument("url")
    parser.add_argument("--format", choices=("safetensors", "huggingface"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--job", type=Path)
    parser.add_argument("--task-config", type=json.loads)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args(arguments)
    try:
        config = None
        if given.format == "huggingface":
            config = task_config(given.job, given.model, given.task_config)
        source, passed = open_source(given.url, given.step)
        for note in passed:
            complain(note)
        done = export(
            source,
            given.output,
            force=given.force,
            task_config=config,
            progress=(lambda *_: None) if given.quiet else ProgressLine(_read),
        )
    except StorageError as error:
        complain(error)
        return EXIT_FAILED
    step = "" if done.step is None else f"step {done.step}, "
    print(f"{given.output}: {step}{_files(source)}{count(done.tensors, 'tensor')}, {size(done.bytes)}")
    return EXIT_OK


def _files(source: StateSource) -> str:
    return f"{count(len(source.manifest.layers), 'layer')}, " if isinstance(source, Checkpoint) else ""


def _read(done: int, of: int) -> str:
    return f"{done} of {count(of, 'file')} read"


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(EXIT_INTERRUPTED))  # so that unfinished output is removed
    sys.exit(standard_streams.exit_of(lambda: main(sys.argv[1:])))
