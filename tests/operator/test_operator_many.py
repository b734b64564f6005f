"""Many jobs at an API server that is slow, in virtual time: what a user hears of each must not wait for all others."""

import asyncio

import pytest

from bamboo_operator.jobs.burst import CALM_SECONDS, Burst
from bamboo_operator.jobs.burst import LONGEST_SECONDS as LONGEST_BURST
from opsim_loop import VirtualLoop
from slow_api_kit import (
    JOBS,
    WORKERS,
    ManyJobs,
    virtual_runner,
)

LIFE_SECONDS = 200.0


MOST_WRITES = 8  # of a job's status in that time, in which its kubelet says 9 times something else of each pod


SOON = 12.0  # 30 writes of 0.8 s, four at a time, and a look every 2 s


def test_the_status_tells_soon_why_pods_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it written again when a kubelet waits instead of trying, and the other way round."""
    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop)
        runner.run(simulated.run(JOBS, LIFE_SECONDS))
    assert simulated.made == dict.fromkeys(simulated.refused, WORKERS)
    assert len(simulated.made) == JOBS
    lags = sorted(simulated.told.get(name, LIFE_SECONDS) - at for name, at in simulated.refused.items())
    assert lags[-1] < SOON, f"median {lags[JOBS // 2]:.1f} s, at most {lags[-1]:.1f} s"
    assert simulated.writes < MOST_WRITES * JOBS
    assert simulated.stuck == [], "a job that waits for others is not stuck"


async def notices(burst: Burst, loop: VirtualLoop, seconds: float) -> None:
    while loop.time() < seconds:
        burst.noticed()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("seconds", "first"), [(1.5, 1.4 + CALM_SECONDS), (60.0, LONGEST_BURST)])
def test_while_workers_are_taken_away_decisions_come_first(
    monkeypatch: pytest.MonkeyPatch, seconds: float, first: float
) -> None:
    """What follows from them waits until it is calm; but if that takes long, nothing waits any more."""

    async def both(simulated: ManyJobs, loop: VirtualLoop) -> None:
        await asyncio.gather(simulated.run(JOBS, 10.0), notices(simulated.burst, loop, seconds))

    with virtual_runner(monkeypatch) as (runner, loop):
        simulated = ManyJobs(loop, slowness=0.1)
        runner.run(both(simulated, loop))
    assert simulated.first is not None
    assert first <= simulated.first < first + 1
    assert simulated.made == {f"job-{number:02}": WORKERS for number in range(JOBS)}
