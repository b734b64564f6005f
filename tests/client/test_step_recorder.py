"""When a measured job has run long enough, and when which worker is killed."""

import asyncio
from dataclasses import replace

import pytest

from bamboo.bench.step_recorder import Enough, KillPlan, StepRecorder
from bamboo.terminal.view import StopJob, TakeWorker, UserRequest
from bamboo_core.coordinator.events import Status
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec
from manifest_kit import bamboojob, training
from operator_kit import takeover
from run_view_kit import STATUS

WHOLE = replace(STATUS, grid=((("w0", True), ("w2", True)),), takeovers=())


def job(steps: int) -> JobSpec:
    return parse_manifest(
        bamboojob(
            task={"entrypoint": "m:build"},
            training=training(steps, 4, 2),
            topology={"stages": 2},
            standby={"workers": 1},
        )
    )


def at(step: int, shown: Status = WHOLE) -> Status:
    return replace(shown, step=step, losses=tuple(map(float, range(step))))


@pytest.mark.parametrize(
    ("ends", "reached"),
    [
        ([1.0, 2.0, 3.0], False),  # one step counts
        ([1.0, 2.0, 3.0, 4.0], False),  # two, which took too little time
        ([1.0, 2.0, 3.0, 9.0], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], True),  # as many as are wanted
    ],
)
def test_enough_is_a_number_of_steps_or_of_seconds(ends: list[float], reached: bool) -> None:
    assert Enough(warmup=2, least=2, most=4, seconds=5.0).reached(ends) is reached


def test_places_of_kills_are_those_of_the_seed() -> None:
    plan = KillPlan(number=10, calm=2, seed=1)
    places = [plan.place(number, 4) for number in range(10)]
    assert places == [plan.place(number, 4) for number in range(10)]
    assert {stage for stage, _ in places} <= set(range(4))
    assert all(0 <= moment < 1 for _, moment in places)
    assert len({moment for _, moment in places}) == 10


def test_a_job_with_steps_to_spare_is_stopped_when_enough_is_known() -> None:
    asked, times = list[UserRequest](), iter([0.0, 1.0, 3.0, 6.0, 10.0])
    recorder = StepRecorder(job(100), Enough(warmup=1, least=2, most=2, seconds=0.0), None, lambda: next(times))
    recorder.start(asked.append)
    for step in (1, 2):
        recorder.status(at(step))
    assert not asked
    recorder.status(at(3))
    assert (asked, recorder.stopped) == ([StopJob()], True)
    recorder.status(at(4))
    assert asked == [StopJob()]
    assert (recorder.steps, recorder.losses) == ((1.0, 2.0), [0.0, 1.0, 2.0, 3.0])


def test_a_worker_is_killed_within_a_step_once_all_stages_are_protected() -> None:
    asked, now = list[UserRequest](), [0.0]
    enough = Enough(warmup=1, least=29, most=29, seconds=0.0)
    recorder = StepRecorder(job(30), enough, KillPlan(number=1, calm=3), lambda: now[0])
    unprotected = replace(WHOLE, grid=STATUS.grid)

    async def play() -> None:
        recorder.start(asked.append)
        for step in range(1, 9):
            now[0] += 0.01
            recorder.status(at(step, unprotected if step < 4 else WHOLE))
            await asyncio.sleep(0)
            assert not asked or step > 5, "three calm steps are waited for"
        while not asked:
            await asyncio.sleep(0.001)

    asyncio.run(play())
    stage, moment = KillPlan(number=1, calm=3).place(0, 2)
    assert asked == [TakeWorker(("w0", "w2")[stage], notice=False)]
    assert recorder.kills() == ()
    now[0] += 0.03
    recorder.status(at(9, replace(WHOLE, takeovers=(takeover(victim="w2", worker="w0"),))))
    (found,) = recorder.kills()
    assert (found.stage, found.step, found.moment) == (stage, 8, moment)
    assert found.affected == pytest.approx(0.03)
    assert found.calm == pytest.approx(0.01)
