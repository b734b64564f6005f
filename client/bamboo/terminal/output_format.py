"""The forms in which commands print things. Imported at every start: nothing heavy here."""

from enum import StrEnum
from typing import Annotated

import typer


class OutputFormat(StrEnum):
    """TEXT is for people, JSON for programs."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format.")]
