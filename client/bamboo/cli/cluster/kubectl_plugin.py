"""`kubectl bamboo`: the same commands as kubectl's plugin, and what kubectl asks it when the user presses the tab key.

kubectl finds it as `kubectl-bamboo` on the PATH, and `kubectl_complete-bamboo` beside it.
"""

import contextlib
import os
import shlex
import sys

import typer

from bamboo.cli import commands
from bamboo.cli.cluster.cluster_commands import app as cluster_commands

CALLED, PROGRAM = "kubectl bamboo", "kubectl-bamboo"
DEFAULT_FILES = ":0"  # what kubectl calls a directive: the candidates, or files if there are none

app = typer.Typer(
    help="Training jobs on spot nodes (BambooJobs).",
    epilog=commands.app.info.epilog,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=commands.app.info.context_settings,
)
app.registered_commands += cluster_commands.registered_commands
app.command()(commands.validate)


def main() -> None:
    commands.main(app, CALLED)


def complete() -> None:
    """kubectl's protocol: the words so far as arguments; candidates a line each, and a directive at the end."""
    words = sys.argv[1:] or [""]
    os.environ["COMP_WORDS"] = shlex.join([PROGRAM, *words[:-1]]) + f" {words[-1]}"
    os.environ["COMP_CWORD"] = str(len(words))
    os.environ[commands.complete_variable(PROGRAM)] = "complete_bash"
    with contextlib.suppress(SystemExit):
        commands.complete(app, PROGRAM)
    print(DEFAULT_FILES)
