"""Output formats of commands. Each `bamboo` command imports this, so it imports nothing heavy."""

from enum import StrEnum
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    """The format of a command's output: TEXT for people, JSON for programs."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format.")]
