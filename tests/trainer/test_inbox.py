"""Where the worker's main thread hears of what other threads have for it."""

import threading
import time

from bamboo_core.control.protocol import SendPlan
from bamboo_core.job.spec import RedundancySpec, TrainingSpec
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Peer
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


def test_when_a_plan_came_is_known_once() -> None:
    peers = [Peer(worker="w0", host="127.0.0.1", port=1)]
    spec = TrainingSpec(steps=1, global_batch_size=2, micro_batch_size=1)
    plan = initial_plan(peers, ((0, 1),), 1, spec, RedundancySpec())
    inbox, before = Inbox(), time.monotonic()
    inbox.put(SendPlan(plan=plan))
    arrival = inbox.arrival(plan)
    assert arrival is not None
    assert before <= arrival <= time.monotonic()
    assert inbox.arrival(plan) is None
