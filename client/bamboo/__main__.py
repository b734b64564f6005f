"""The `bamboo` command. It imports the rest late, so that Ctrl-C is quiet from the start."""

from bamboo import stop_signals


def main() -> None:
    """Run the command line; signals end the process at once before and after it, when nothing is open."""
    try:
        stop_signals.end_at_once()
        from bamboo.cli import commands

        commands.main()
    finally:
        stop_signals.end_at_once()


if __name__ == "__main__":
    main()
