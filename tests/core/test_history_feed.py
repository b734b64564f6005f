"""What a shell tells the root of the job's history."""

from bamboo_core.control.channel_events import Received, WorkerJoined
from bamboo_core.control.history_feed import AT_ONCE, MOST_WAITING, HistoryFeed
from bamboo_core.control.protocol import Hello, HistoryKept
from bamboo_core.coordinator.events import Emit, Tick
from replica_kit import planned

pytest_plugins = ["history_fixtures"]


def test_a_root_is_told_every_event_until_it_is_kept():
    feed = HistoryFeed("s", lambda: 7.0)
    assert feed.due("w0") is None
    for number in range(3):
        feed.add(Emit("Reason", f"message {number}", number == 1))
    assert feed.due(None) is None
    told = feed.due("w0")
    assert [(e.number, e.warning) for e in told.events] == [(1, False), (2, True), (3, False)]
    assert feed.due("w0") is None
    feed.kept(HistoryKept(source="s", number=2))
    feed.kept(HistoryKept(source="another", number=3))
    assert [e.number for e in feed.due("w1").events] == [3], "a new root is told what is not known to be kept"
    feed.rejoined("w1")
    assert [e.number for e in feed.due("w1").events] == [3]
    feed.rejoined("w2")
    assert feed.due("w1") is None


def test_what_a_root_is_told_is_bounded():
    feed = HistoryFeed("s", lambda: 7.0)
    for number in range(MOST_WAITING + 5):
        feed.add(Emit("Reason", f"message {number}"))
    told = []
    while (events := feed.due("w0")) is not None:
        assert len(events.events) <= AT_ONCE
        told += [event.number for event in events.events]
    assert told == list(range(6, MOST_WAITING + 6))


def test_a_turn_tells_the_root_and_what_it_answers_or_that_it_is_back_counts_at_once():
    feed, plan = HistoryFeed("s", lambda: 7.0), planned(2, 1, 1, "a")
    assert feed.follow(Tick(), [Emit("First", "before there is a plan")], None) is None
    worker, events = feed.follow(Tick(), [Emit("Second", "x")], plan)
    assert (worker, [event.reason for event in events.events]) == ("w0", ["First", "Second"])
    assert feed.follow(Tick(), [], plan) is None
    back = WorkerJoined(Hello(worker="w0", host="h", port=1))
    assert feed.follow(back, [], plan) == (worker, events)
    kept = Received("w0", HistoryKept(source="s", number=2))
    assert feed.follow(kept, [], plan) is None
    assert feed.rest().events == ()
