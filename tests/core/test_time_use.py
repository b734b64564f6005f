"""Categories of a worker's use of time: every instruction has one."""

from typing import get_args

from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.schedule import Instruction
from bamboo_trainer.worker.telemetry import IN_ADVANCE, NEVER_AWAITED


def test_every_instruction_has_its_kind() -> None:
    instructions = {kind.__name__ for one in get_args(Instruction) for kind in (one, *one.__subclasses__())}
    assert set(TIME_USE_OF_SPAN) == instructions | NEVER_AWAITED | {"OptimizerStep", "Wait"}
    assert {TIME_USE_OF_SPAN[name] for name in IN_ADVANCE} == {TimeUse.REHEARSAL}
