"""docs/troubleshooting.md's table of notices is what the marks of the clouds are now."""

import runpy
from typing import Any

from folders import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
GENERATOR: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate_notices.py"))


def test_the_table_is_not_stale() -> None:
    assert GENERATOR["page"](PAGE) == PAGE, "run `make docs`"
