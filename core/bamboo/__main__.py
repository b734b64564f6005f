"""The `bamboo` command, also as kubectl's plugin. It imports the rest late, so that Ctrl-C is quiet from the start."""

import sys

from bamboo.names import EXIT_INTERRUPTED


def main() -> None:
    try:
        from bamboo.cli import commands

        commands.main()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def kubectl() -> None:
    """`kubectl bamboo ...`, which runs kubectl-bamboo."""
    try:
        from bamboo.cli.cluster import kubectl_plugin

        kubectl_plugin.main()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def kubectl_complete() -> None:
    """What kubectl runs to complete `kubectl bamboo ...`."""
    from bamboo.cli.cluster import kubectl_plugin

    kubectl_plugin.complete()


if __name__ == "__main__":
    main()
