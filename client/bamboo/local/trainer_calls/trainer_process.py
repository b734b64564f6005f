"""Processes of the trainer, which needs torch. Commands start them, so as not to import torch themselves."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bamboo import background, stop_signals
from bamboo.local.fork_server import ForkServer, ForkServerError
from bamboo.local.scratch import scratch_folder
from bamboo_core.complaints import complain
from bamboo_core.names import EXIT_FAILED
from bamboo_core.text import one_line

NEEDED = ("bamboo_trainer", "torch")
OFFLINE = "bamboo_trainer.offline"
END_SECONDS = 30.0  # in which the process removes incomplete files


class TrainerError(RuntimeError):
    """Error of a call to the trainer; the text is a sentence for the user."""


def missing_packages() -> str:
    """Return the packages of NEEDED that are not installed, joined by "and"; "" if none is missing."""
    return " and ".join(module for module in NEEDED if find_spec(module) is None)


def run_trainer(what: str, name: str, *arguments: str, **options: object) -> int:
    """Call a function of bamboo_trainer.offline in a new process with the same standard streams; return its exit code.

    what: the purpose, in words. name: the function's name; it gets `arguments` and `options`. Without the trainer
    or torch the exit code is EXIT_FAILED.
    """
    if missing := missing_packages():
        complain(f"{what} needs {missing}, not installed here")
        return EXIT_FAILED
    process = None
    try:
        with stop_signals.held():  # a signal during the start would leave the process behind
            process = subprocess.Popen(_command(name, arguments, options))
        return process.wait()
    finally:  # a signal may have interrupted this process
        if process is not None:
            _end(process)


def run_silently(what: str, name: str, *arguments: str, **options: object) -> None:
    """Call a function like `run_trainer`, without output. Any thread may call this. Raises TrainerError if it fails."""
    if missing := missing_packages():
        raise TrainerError(f"{what} needs {missing}, not installed here")
    process = subprocess.Popen(
        _command(name, arguments, options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed = process.communicate()[1].decode(errors="replace").strip().removeprefix("bamboo: ")
    finally:
        _end(process)
    if process.returncode:
        raise TrainerError(printed or f"{what} ended with code {process.returncode}")


def _command(name: str, arguments: Sequence[str], options: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-P", "-m", OFFLINE, name, json.dumps(options, default=str), *arguments]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask_trainer(function: str, arguments: dict[str, Any], folders: Sequence[Path], *, failed: str) -> dict[str, Any]:
    """Call "module:function" of the trainer in a new process; return its answer. folders: as in `ForkServer`.

    Raises TrainerError with the answer's `problem`, or with a sentence that begins with `failed`, says what is missing
    or went wrong, and ends with the process's last output, if any.
    """
    if missing := missing_packages():
        raise TrainerError(f"{failed}: {missing} not installed here")
    answer = background.call(_ask(function, arguments, folders, failed))
    if problem := answer.get("problem"):
        raise TrainerError(str(problem))
    return answer


async def _ask(function: str, arguments: dict[str, Any], folders: Sequence[Path], failed: str) -> dict[str, Any]:
    with scratch_folder() as scratch:
        pool = ForkServer(
            lambda worker, code: None, scratch / "log", folders=folders, scratch=scratch, on_wait=complain
        )
        try:  # it may be stopped while the pool is opened, too
            await pool.open()
            answer: dict[str, Any] = await pool.call(function, arguments)
        except ForkServerError as error:
            printed = one_line(pool.tail(3))
            raise TrainerError(f"{failed}: {error}" + (f" ({printed})" if printed else "")) from None
        finally:
            await pool.close()
    return answer
