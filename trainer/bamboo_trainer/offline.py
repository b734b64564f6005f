"""The child processes of `bamboo export` and `bamboo tokenize`, since the `bamboo` command itself runs without torch.

`python -m bamboo_trainer.offline NAME JSON ARGUMENT...` calls the function of that name with these arguments and, as
keyword arguments, the items of the JSON object. It prints the function's result.
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bamboo_core import standard_streams
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, DocumentUnit
from bamboo_core.storage.bounded import StorageError
from bamboo_core.text import count, size
from bamboo_trainer.checkpoint import export as exports
from bamboo_trainer.checkpoint.sources import Checkpoint, open_source
from bamboo_trainer.data import tokenizing
from bamboo_trainer.data.sources import SUFFIX

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINE_SECONDS: Final = 5.0  # between two lines of progress that is not shown on a terminal


class ProgressLine:
    """Printer of progress to standard error: one changing line on a terminal, elsewhere a new line every few seconds.
    text: takes (amount done, amount in total), and returns the line.
    """

    def __init__(self, text: Callable[[int, int], str]) -> None:
        self._text, self._terminal, self._last = text, sys.stderr.isatty(), time.monotonic()
        self._printed = False  # a line was printed

    def __call__(self, done: int, of: int) -> None:
        text = self._text(done, of)
        if self._terminal:
            print(f"\r{text}   ", end="\n" if done == of else "", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > LINE_SECONDS or (done == of and self._printed):
            self._last, self._printed = time.monotonic(), True
            print(text, file=sys.stderr, flush=True)


def export(
    url: str,
    *,
    output: str,
    format: str,
    step: int | None = None,
    job: str | None = None,
    model: str | None = None,
    config: dict[str, Any] | None = None,
    force: bool = False,
    quiet: bool = False,
) -> str:
    """Export a checkpoint or weights; return a summary. config: used without `job`. Raises ValueError, StorageError."""
    if format not in ("safetensors", "huggingface"):
        raise ValueError(f"the format of an export is safetensors or huggingface, not {format!r}")
    task_config = None
    if format == "huggingface":
        task_config = exports.task_config(Path(job) if job else None, Path(model) if model else None, config)
    source, passed = open_source(url, step)
    for note in passed:
        complain(note)
    progress = _progress(quiet, lambda done, of: f"{done} of {count(of, 'file')} read")
    done = exports.export(source, Path(output), force=force, task_config=task_config, progress=progress)
    of_step = "" if done.step is None else f"step {done.step}, "
    layers = f"{count(len(source.manifest.layers), 'layer')}, " if isinstance(source, Checkpoint) else ""
    return f"{output}: {of_step}{layers}{count(done.tensors, 'tensor')}, {size(done.bytes)}"


def tokenize(
    *texts: str,
    output: str,
    tokenizer: str = tokenizing.BYTES,
    end: str = "",
    field: str = "text",
    document: str = DocumentUnit.FILE,
    pattern: list[str] | None = None,
    shard: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> str:
    """Tokenize text files and folders; return a summary. pattern: globs for files in folders. Raises ValueError."""
    path = Path(output)
    if shard is None and path.suffix != SUFFIX:
        raise ValueError(f"--output {path}: expected a file NAME{SUFFIX}, or with --shard a folder's name")
    files = tokenizing.text_files([Path(text) for text in texts], pattern or tokenizing.PATTERNS, path)
    encoder: tokenizing.Encoder = tokenizing.ByteEncoder()
    if tokenizer != tokenizing.BYTES:
        encoder = tokenizing.TokenizerEncoder(Path(tokenizer), end)
    elif end:
        raise ValueError("--end: bytes have no such token; expected it together with --tokenizer")
    done = tokenizing.tokenize(
        tokenizing.Texts(files=files, field=field, unit=DocumentUnit(document)),
        encoder,
        path,
        shard=shard,
        force=force,
        progress=_progress(quiet, lambda done, of: f"{size(done)} of {size(of)} read"),
    )
    in_files = f" in {count(done.files, 'file')}" if shard else ""
    of_documents = f"{count(done.tokens, 'token')}, {count(done.documents, 'document')}{in_files}"
    return f"{path}: {of_documents}, vocabulary {done.vocabulary}"


def _progress(quiet: bool, text: Callable[[int, int], str]) -> Callable[[int, int], None]:
    return (lambda *_: None) if quiet else ProgressLine(text)


def main(name: str, options: str, *arguments: str) -> int:
    functions: dict[str, Callable[..., str]] = {"export": export, "tokenize": tokenize}
    try:
        print(functions[name](*arguments, **json.loads(options)))
    except (ValueError, StorageError) as error:
        complain(error)
        return EXIT_FAILED
    return EXIT_OK


def _interrupt(*_: object) -> None:
    """Raise SystemExit, to remove unfinished output. Ignore later signals: after Ctrl-C the parent sends another."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    sys.exit(standard_streams.exit_of(lambda: main(*sys.argv[1:])))
