"""Fixtures of the tests that share them: see `history_kit`."""

import pytest

from bamboo.history.files import HistoryFile, HistoryFiles
from history_kit import event, step


@pytest.fixture
def kept(tmp_path):
    """A job that went back from step 5 to step 3; its second root had read too little and wrote step 1 again."""
    files = HistoryFiles(str(tmp_path / "run" / "history" / "job"))
    files.write(HistoryFile(1, 1, 0), [event(1, 1000.5), *map(step, range(3))])
    files.write(HistoryFile(1, 7, 0), [step(1, loss=9.0), step(3), step(4), event(1, 1000.5), event(2, 1003.5)])
    files.write(HistoryFile(2, 9, 0), [step(3, 2), step(4, 2), step(5, 2, skipped=True, loss=None, metrics={"a b": 2})])
    return tmp_path / "run"
