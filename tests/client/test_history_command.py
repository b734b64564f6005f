"""`bamboo history`: output and refusals."""

from bamboo_core.history.files import HistoryFile, HistoryFiles
from bamboo_core.history.records import to_lines
from history_kit import evaluated, shown, step

pytest_plugins = ["history_kit"]


def test_what_is_no_history_is_told(kept, tmp_path):
    assert f"there is no history in {tmp_path}" in shown(tmp_path, code=1)
    HistoryFiles(str(kept / "history" / "other")).write(HistoryFile(1, 1, 0), [step(1)])
    assert "there are the histories of several jobs" in shown(kept, code=1)
    assert len(shown(kept / "history" / "other").splitlines()) == 1
    (kept / "history" / "other" / "000001-0000000002-000000.jsonl").write_text("rubbish\n")
    assert "000001-0000000002-000000.jsonl line 1 is no record" in shown(kept / "history" / "other", code=1)


def test_the_evaluation_of_the_last_state_is_told_with_the_steps_that_it_has_seen(kept):
    HistoryFiles(str(kept / "history" / "other")).write(HistoryFile(1, 1, 0), [step(10), evaluated(10, loss=0.5)])
    lines = shown(kept / "history" / "other").splitlines()
    assert "  step 10, loss " in lines[0]
    assert lines[1].endswith("  after step 10, evaluation loss 0.5")


def test_the_output_of_a_run_tells_its_history_wherever_its_checkpoints_are(kept, tmp_path):
    """If checkpoints are elsewhere, the output has no history but history.jsonl, which the run writes at its end."""
    output = tmp_path / "output"
    output.mkdir()
    (output / "history.jsonl").write_bytes(to_lines([step(1), step(2)]))
    assert len(shown(output).splitlines()) == 2
    (kept / "history.jsonl").write_bytes(to_lines([step(1)]))
    assert len(shown(kept).splitlines()) > 2, "a run that goes on writes into the folder"
