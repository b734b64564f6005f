"""The end of a local run's history."""

from bamboo.control.history_feed import HistoryFeed
from bamboo.coordinator.events import Emit
from bamboo.history.records import from_lines
from bamboo.local.history_end import end_history


def test_the_end_of_a_local_run_adds_what_no_worker_has_written(kept):
    feed = HistoryFeed("z", lambda: 9999.0)
    feed.add(Emit("Complete", "all is done"))
    url = str(kept / "history" / "job")
    for _ in range(2):  # twice does no harm
        end_history(url, feed.rest(), kept)
    records = from_lines((kept / "history.jsonl").read_bytes(), "history.jsonl")
    assert len(records) == 11
    assert (records[-1].reason, records[-1].attempt) == ("Complete", 2)
