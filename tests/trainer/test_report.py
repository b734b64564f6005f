"""A worker's report about the states that it holds."""

from bamboo_core.control.protocol import Report
from engine_kit import OneEngine


def test_a_worker_without_a_plan_answers_too() -> None:
    """A worker whose first plan was lost answers, since the coordinator waits for the reports of all workers."""
    one = OneEngine("w", None)
    one.engine.report()
    assert one.said == [Report(committed=-1, held={})]
