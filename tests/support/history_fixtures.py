"""Fixtures for `history_kit`."""

import pytest

from bamboo_core.history.files import HistoryFile, HistoryFiles
from history_kit import event, step


@pytest.fixture
def kept(tmp_path):
    """The history of a job that went back from step 5 to step 3; its second root missed records and wrote step 2
    again.
    """
    files = HistoryFiles(str(tmp_path / "run" / "history" / "job"))
    files.write(HistoryFile(1, 1, 0), [event(1, 1001.5), *map(step, range(1, 4))])
    files.write(HistoryFile(1, 7, 0), [step(2, loss=9.0), step(4), step(5), event(1, 1001.5), event(2, 1004.5)])
    files.write(HistoryFile(2, 9, 0), [step(4, 2), step(5, 2), step(6, 2, skipped=True, loss=None, metrics={"a b": 2})])
    return tmp_path / "run"
