"""The `bamboo` command. It imports the rest late, so that Ctrl-C is quiet from the first moment."""

import sys

from bamboo.names import EXIT_INTERRUPTED


def main() -> None:
    try:
        from bamboo import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
