"""The `bamboo` command, also as kubectl's plugin. It imports the rest late, so that Ctrl-C is quiet from the start."""

import contextlib
from collections.abc import Iterator

from bamboo import stop_signals


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lets signals end the process at once before and after the command, when nothing is open."""
    try:
        stop_signals.end_at_once()
        yield
    finally:
        stop_signals.end_at_once()


def main() -> None:
    with _quiet():
        from bamboo.cli import commands

        commands.main()


def kubectl() -> None:
    """`kubectl bamboo ...`, which runs kubectl-bamboo."""
    with _quiet():
        from bamboo.cli.cluster import kubectl_plugin

        kubectl_plugin.main()


def kubectl_complete() -> None:
    """What kubectl runs to complete `kubectl bamboo ...`."""
    with _quiet():
        from bamboo.cli.cluster import kubectl_plugin

        kubectl_plugin.complete()


if __name__ == "__main__":
    main()
