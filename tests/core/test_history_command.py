"""`bamboo history`: what is printed."""

from bamboo.history.files import HistoryFile, HistoryFiles
from history_kit import shown, step

pytest_plugins = ["history_fixtures"]


def test_what_is_no_history_is_told(kept, tmp_path):
    assert f"there is no history in {tmp_path}" in shown(tmp_path, code=1)
    HistoryFiles(str(kept / "history" / "other")).write(HistoryFile(1, 1, 0), [step(0)])
    assert "there are the histories of several jobs" in shown(kept, code=1)
    assert len(shown(kept / "history" / "other").splitlines()) == 1
    (kept / "history" / "other" / "000001-0000000002-000000.jsonl").write_text("rubbish\n")
    assert "000001-0000000002-000000.jsonl line 1 is no record" in shown(kept / "history" / "other", code=1)
    assert "--follow and --output csv: expected at most one of them" in shown(kept, "-f", "-o", "csv", code=2)
