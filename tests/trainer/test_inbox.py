"""Where the worker's main thread hears of what other threads have for it."""

import threading

from bamboo_trainer.transport.base import LinkDown, LinkUp
from bamboo_trainer.worker.inbox import Inbox

PATIENCE = 120.0


def test_all_that_is_there_comes_in_order_and_nothing_twice() -> None:
    inbox = Inbox()
    said = [LinkDown("w1"), LinkUp("w1"), LinkDown("w2")]
    for one in said:
        inbox.put(one)
    assert inbox.take(0.0) == said
    assert inbox.take(0.0) == []


def test_who_waits_is_woken_by_another_thread() -> None:
    inbox, found = Inbox(), list[object]()
    waiting = threading.Thread(target=lambda: found.extend(inbox.take(PATIENCE)))
    waiting.start()
    inbox.put(LinkDown("w1"))
    waiting.join(PATIENCE)
    assert found == [LinkDown("w1")]
