"""The queue of a job's events for its history: it is bounded, and keeps each event until the root confirms it."""

from bamboo_core.control.protocol import Hello, HistoryKept, Received, WorkerJoined
from bamboo_core.coordinator.events import Emit, Tick
from bamboo_core.coordinator.history_feed import AT_ONCE, MOST_WAITING, HistoryFeed
from replica_kit import after_loss, planned

PLAN = planned(2, 1, 1, "a")


def test_a_root_is_told_every_event_until_it_is_kept():
    feed = HistoryFeed("s", lambda: 7.0)
    assert feed.follow(Tick(), [Emit("First", "before there is a plan")], None) is None
    worker, events = feed.follow(Tick(), [Emit("Second", "x", True), Emit("Third", "y")], PLAN)
    assert [(e.number, e.reason, e.warning) for e in events.events] == [
        (1, "First", False),
        (2, "Second", True),
        (3, "Third", False),
    ]
    assert feed.follow(Tick(), [], PLAN) is None
    back = WorkerJoined(Hello(worker=worker, host="h", port=1))
    assert feed.follow(back, [], PLAN) == (worker, events), "messages may have been lost with the channel"
    assert feed.follow(WorkerJoined(Hello(worker="other", host="h", port=1)), [], PLAN) is None
    assert feed.follow(Received(worker, HistoryKept(source="another", number=3)), [], PLAN) is None
    assert feed.follow(Received(worker, HistoryKept(source="s", number=2)), [], PLAN) is None
    assert [event.number for event in feed.rest().events] == [3]
    other, rest = feed.follow(Tick(), [], after_loss(PLAN, {worker}))
    assert other != worker
    assert rest == feed.rest(), "a new root is told what is not known to be kept"


def test_what_a_root_is_told_is_bounded():
    feed = HistoryFeed("s", lambda: 7.0)
    for number in range(MOST_WAITING + 5):
        feed.add(Emit("Reason", f"message {number}"))
    told = []
    while owed := feed.follow(Tick(), [], PLAN):
        assert len(owed[1].events) <= AT_ONCE
        told += [event.number for event in owed[1].events]
    assert told == list(range(6, MOST_WAITING + 6))
