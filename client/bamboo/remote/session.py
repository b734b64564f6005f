"""The session of a command: access to the cluster, prompts, retries, waiting, Ctrl-C, and exit codes."""

import asyncio
import contextlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bamboo import loop_signals
from bamboo_core.complaints import complain, said_by
from bamboo_core.job.fields import ManifestError
from bamboo_core.job.yaml_file import load_document
from bamboo_core.kube.api import Access, Connection, KubeApi, log_in
from bamboo_core.kube.errors import ApiError, ClusterUnreachable, RemoteError, UsageError
from bamboo_core.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from bamboo_core.text import printable

T = TypeVar("T")
PATIENCE_SECONDS = 60.0  # for which a watching command retries while the API server is away
LOOK_SECONDS = 0.5  # between checks while waiting
PIPE_WIDTH = 400  # columns without a terminal, so that lines are hardly ever cut
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KINDS = ("bamboojob/", "bamboojobs/", "bj/", "bamboojob.bamboo.dev/", "bamboojobs.bamboo.dev/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The name of a job, and its namespace if given."""

    name: str
    namespace: str | None = None


class Session:
    """The API client, default namespace and console of a running command. quiet: print no messages."""

    def __init__(self, api: KubeApi, namespace: str, *, quiet: bool = False) -> None:
        self.api, self.namespace, self.quiet = api, namespace, quiet
        self.console = console()

    def of(self, target: Target) -> tuple[str, str]:
        """Return (namespace, name) of a job; the default namespace is the session's."""
        return target.namespace or self.namespace, target.name

    def say(self, text: str) -> None:
        """Print a message, unless --quiet is given."""
        if not self.quiet:
            print(text, flush=True)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call, and retry it for up to PATIENCE_SECONDS while the API server is unreachable, busy or failing."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await call()
        except (ClusterUnreachable, ApiError) as error:
            if (isinstance(error, ApiError) and not error.may_pass) or time.monotonic() > end:
                raise
            await asyncio.sleep(2.0)


class WaitTimedOut(RemoteError):
    """Error because the condition of a wait was not met in time."""


async def until(
    look: Callable[[], Awaitable[T]], met: Callable[[T], object], otherwise: Callable[[T], str], seconds: float | None
) -> T:
    """Call `look` until its result meets a condition, and return it. seconds: None waits forever.

    otherwise: makes the text of WaitTimedOut from the last result.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    while not met(seen := await patiently(look)):
        if time.monotonic() > end:
            raise WaitTimedOut(otherwise(seen))
        await asyncio.sleep(LOOK_SECONDS)
    return seen


Command = Callable[[Session], Coroutine[Any, Any, int]]


def run(
    command: Command, *, namespace: str | None, context: str | None, kubeconfig: str | None, quiet: bool = False
) -> int:
    """Run a command on the cluster that the flags and the kubeconfig select; return its exit code.

    A RemoteError is printed on standard error and gives its code; Ctrl-C gives EXIT_INTERRUPTED, a closed pipe EXIT_OK.
    """
    try:
        return loop_signals.run_until_stopped(lambda: _run(command, namespace, context, kubeconfig, quiet))
    except RemoteError as error:
        complain(printable(said_by(error)))
        return error.code
    except BrokenPipeError:  # such as: bamboo logs JOB | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED


async def way_to(namespace: str | None, context: str | None, kubeconfig: str | None) -> Access:
    """Log in to the cluster that the flags and the kubeconfig select. Raises RemoteError, also for a bad namespace."""
    if namespace and not NAME.fullmatch(namespace):
        raise UsageError(f"--namespace {namespace}: expected the name of a namespace")
    return await log_in(kubeconfig, context)


async def _run(
    command: Command, namespace: str | None, context: str | None, kubeconfig: str | None, quiet: bool
) -> int:
    access = await way_to(namespace, context, kubeconfig)
    async with KubeApi(Connection(access)) as api:
        return await command(Session(api, namespace or access.namespace, quiet=quiet))


def names_file(given: str) -> bool:
    """Return whether an argument is the path of a manifest, which need not exist, rather than a job's name."""
    return given.endswith((".yaml", ".yml", ".json")) or Path(given).is_file()


def target(given: str) -> Target:
    """Parse an argument for a job: NAME, TYPE/NAME as kubectl prints it, or its manifest's file. Raises UsageError."""
    if names_file(given):
        try:
            metadata = load_document(given).get("metadata")
        except ManifestError as error:
            raise UsageError(str(error)) from None
        metadata = metadata if isinstance(metadata, dict) else {}
        name, namespace = metadata.get("name"), metadata.get("namespace")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UsageError(f"{given}: metadata.name: expected the name of a job")
        return Target(name=name, namespace=namespace if isinstance(namespace, str) else None)
    name = next((given.removeprefix(kind) for kind in KINDS if given.startswith(kind)), given)
    if not NAME.fullmatch(name):
        raise UsageError(f"{given}: expected the name of a job or the file of a manifest")
    return Target(name=name)


def console() -> Console:
    """Return a console on standard output, as wide as the terminal or COLUMNS, or else PIPE_WIDTH."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=PIPE_WIDTH)


def on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirm(consequence: str, *, yes: bool) -> None:
    """Ask whether to continue, unless `yes`. Raises Declined if the user refuses, UsageError without a terminal."""
    if yes:
        return
    if not on_a_terminal():
        raise UsageError(f"{consequence}; pass --yes to do it anyway")
    with _interruptible():
        try:
            answer = input(f"{consequence}. Continue? [y/N] ")
        except EOFError:
            answer = ""
        except KeyboardInterrupt:
            print()
            raise
    if answer.strip().lower() not in ("y", "yes"):
        raise Declined("nothing was done")


class Declined(RemoteError):
    """Error because the user declined to confirm a command."""

    code = EXIT_FAILED


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt a prompt, since the event loop, which usually handles it, does not run meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
