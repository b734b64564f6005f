"""`python -m bamboo_trainer.checkpoint`: what `bamboo export` runs, which itself needs no torch."""

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Final

from bamboo.checkpoint.find import find
from bamboo.checkpoint.store import CheckpointStore
from bamboo.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from bamboo.storage.errors import StorageError
from bamboo.text import count, size
from bamboo_trainer.checkpoint.export import ExportError, Form, export

LINE_SECONDS: Final = 5.0  # between two lines of progress that is not shown on a terminal


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bamboo_trainer.checkpoint")
    parser.add_argument("url")
    parser.add_argument("--format", type=Form, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(EXIT_INTERRUPTED))  # what is half written is removed then
    try:
        store = CheckpointStore(given.url)
        manifest, passed = find(store.list(), store.shown, given.step)
        for note in passed:
            print(f"bamboo: {note}", file=sys.stderr)
        done = export(
            store, manifest, given.format, given.output, force=given.force,
            progress=(lambda *_: None) if given.quiet else Shown(sys.stderr.isatty()),
        )  # fmt: skip
    except (StorageError, ExportError) as error:
        print(f"bamboo: {error}", file=sys.stderr)
        return EXIT_FAILED
    layers = count(len(manifest.layers), "layer")
    print(f"{given.output}: step {done.step}, {layers}, {count(done.tensors, 'tensor')}, {size(done.bytes)}")
    return EXIT_OK


class Shown:
    """Progress on standard error: one line that changes, or a new one now and then."""

    def __init__(self, terminal: bool) -> None:
        self._terminal, self._last = terminal, time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        text = f"{done} of {count(of, 'layer')} read"
        if self._terminal:
            print(f"\r{text}", end="\n" if done == of else "", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > LINE_SECONDS:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
