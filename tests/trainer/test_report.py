"""What a worker answers when it is asked what it holds."""

from typing import Any

from bamboo_core.control.protocol import Report
from bamboo_trainer.engine.engine import Engine
from bamboo_trainer.engine.ports import Ports
from bamboo_trainer.telemetry.spans import Spans
from recording_transport import Told


def test_a_worker_without_a_plan_answers_too() -> None:
    """Its first plan may have been lost with a channel; who asks waits for everybody."""
    said = Told()
    nowhere: Any = None
    engine = Engine(
        Ports(
            worker="w",
            steps=1,
            builder=nowhere,
            files=nowhere,
            transport=nowhere,
            coordinator=said,
            new_id=nowhere,
            observer=Spans(),
            clock=lambda: 0.0,
            work_clock=lambda: 0.0,
        )
    )
    engine.report()
    assert said == [Report(committed=-1, held={})]
