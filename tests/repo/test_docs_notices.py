"""The table of notices in docs/troubleshooting.md agrees with the marks of the clouds."""

import runpy
from typing import Any

from folders import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
GENERATOR: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate_notices.py"))


def test_the_table_is_not_stale() -> None:
    assert GENERATOR["page"](PAGE) == PAGE, "run `make docs`"
