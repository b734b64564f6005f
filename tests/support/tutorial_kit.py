"""The files that docs/tutorial.md shows."""

import re
from pathlib import Path

TUTORIAL = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def shown(kind: str, name: str) -> str:
    """Return the text of a file that the tutorial shows. kind: the language of its code block."""
    found = re.search(rf"`{re.escape(name)}`:\n\n```{kind}\n(.*?)```", TUTORIAL, re.DOTALL)
    assert found is not None, name
    return found[1]
