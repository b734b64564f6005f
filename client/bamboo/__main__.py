"""Entry point of the `bamboo` command. It handles signals before slow imports, so that Ctrl-C prints no traceback."""

from bamboo import stop_signals


def main() -> None:
    """Run the command line. Before and after, when nothing needs closing, a stop signal ends the process at once."""
    try:
        stop_signals.end_at_once()
        from bamboo.cli import commands

        commands.main()
    finally:
        stop_signals.end_at_once()


if __name__ == "__main__":
    main()
