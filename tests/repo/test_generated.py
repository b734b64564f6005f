"""The files that `make docs` writes: each is as its generator would write it now."""

import re
import runpy
from pathlib import Path

import pytest

from folders import ROOT

DOCS = re.findall(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2")
@pytest.mark.parametrize("generator", re.findall(r"\S+\.py", DOCS))
def test_what_is_generated_is_not_stale(generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dict[Path, str]()
    monkeypatch.setattr(Path, "write_text", lambda path, text: made.update({path: text}))
    monkeypatch.syspath_prepend(str((ROOT / generator).parent))
    runpy.run_path(str(ROOT / generator), run_name="__main__")
    assert made
    assert made == {path: path.read_text() for path in made}, "run `make docs`"
