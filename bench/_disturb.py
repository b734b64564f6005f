"""A fault injector that takes a job's workers one after the other, and the durations of each takeover's phases."""

import asyncio
import random
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from _common import MACHINES, Job, Lab, median, say
from _recorder import Done, read
from bamboo_core.control.protocol import HoldState, PlanApplied, Received, SendPlan, TakenOver
from bamboo_core.coordinator.events import Command, Event, PreemptionNotice, Send
from bamboo_core.planning.heirs import level_counts
from bamboo_core.planning.plan import Cell, WorkerId

CALM = 6  # undisturbed steps before each disturbance; their median is the usual duration
NOTICE_SECONDS = 30.0
BACKWARDS = ("Backward", "BackwardInput")
WORK = ("Forward", *BACKWARDS, "BackwardRest", "BackwardWeight")


@dataclass(slots=True)
class Disturbance:
    """A worker's loss or notice, and the moments of its cell's takeover (monotonic clock).

    calm: median seconds of an undisturbed step before. anew: the step began anew on another grid, without a takeover.
    """

    victim: WorkerId
    cell: Cell
    notice: bool
    step: int  # in progress, as far as the coordinator knows
    calm: float
    at: float
    known: float | None = None  # the coordinator declares the loss, or has the notice
    planned: float | None = None
    epoch: int = 0
    heir: WorkerId = ""
    applied: float | None = None
    taken: float | None = None
    reported: TakenOver | None = None
    anew: bool = False


@dataclass(slots=True)
class Taker:
    """A fault injector that kills `count` workers one by one, or gives them notice, and then stops the job. Each victim
    owns a random cell and is taken at a random moment of a step, after the job has healed.

    A step has `count` equal parts. One worker is taken in each part, in random order, so that all runs have equally
    late losses. A killed worker's replacement starts only two steps later, as on a new node, because on this machine
    its start would take a core from the other workers.
    """

    job: Job
    count: int
    notice: bool
    rng: random.Random
    found: list[Disturbance] = field(default_factory=list)
    _calm_since: int | None = None  # the first undisturbed step
    _due: bool = False
    _cells: list[Cell] = field(default_factory=list)
    _parts: list[int] = field(default_factory=list)

    def look(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        last = self.found[-1] if self.found else None
        if last and self._is_open(last):
            self._follow(last, now, event, commands)
        if last and len(self.job.committed) >= last.step + 2 and self.job.machines < MACHINES:
            self.job.machines = MACHINES
            self.job.staff()
        if any(isinstance(c, Send) and isinstance(c.message, SendPlan) for c in commands) or not self._settled():
            self._calm_since = None
            return
        done = len(self.job.committed)
        if self._calm_since is None:
            self._calm_since = done + 1  # not the one in progress
        if self._due or done < self._calm_since + CALM or (last and self._is_open(last)):
            return
        if len(self.found) == self.count:
            self.job.stop()
        elif isinstance(event, Received):
            self._due = True
            self._parts = self._parts or self.rng.sample(range(self.count), self.count)
            moment = (self._parts[-1] + self.rng.random()) / self.count
            asyncio.get_running_loop().call_later(moment * self._step_seconds(), self._strike)

    def _is_open(self, d: Disturbance) -> bool:
        """Return whether a takeover's report is still due or, if its step began anew, the next step's commit."""
        return len(self.job.committed) <= d.step + 1 if d.anew else d.reported is None

    def _settled(self) -> bool:
        """Return whether the plan is in force, each cell has an owner of its own, and all replicas are in sync."""
        state = self.job.state
        if state.plan is None or state.phase != "Running" or not state.plan.worker_ids() <= state.plans.applied:
            return False
        cells = state.plan.cells()
        owners = {state.plan.at(c).owner for c in cells}
        holders = state.plan.holders()
        copies = level_counts(state.plan, state.plans.synced, set(holders), {worker: worker for worker in holders})
        level = all((c, w) in state.plans.synced for c in cells for w in state.plan.at(c).replicas)
        return min(copies.values()) > 1 and level and len(owners) == len(cells)

    def _step_seconds(self) -> float:
        times = self.job.committed
        steps = sorted(times)[-CALM:]
        return median([times[k] - times[k - 1] for k in steps])

    def _strike(self) -> None:
        self._due = False
        if not self._settled():
            return  # look() chooses another moment
        plan = self.job.state.plan
        assert plan is not None
        if not self._cells:
            cells = plan.cells()
            self._cells = self.rng.sample(cells, len(cells))
        cell = self._cells.pop()
        self._parts.pop()
        victim = plan.at(cell).owner
        calm, step, at = self._step_seconds(), len(self.job.committed), asyncio.get_running_loop().time()
        if self.notice:
            self.job.queue.put_nowait(PreemptionNotice(victim, NOTICE_SECONDS))
        else:
            self.job.machines = len(self.job.lab.pool.alive) - 1
            self.job.lab.pool.signal(victim, signal.SIGKILL)
        self.found.append(Disturbance(victim, cell, self.notice, step, calm, at))
        say(f"{'notice' if self.notice else 'kill'} {len(self.found)}/{self.count}: stage {cell.stage}, step {step}")

    def _follow(self, d: Disturbance, now: float, event: Event, commands: Sequence[Command]) -> None:
        state = self.job.state
        if d.known is None and (d.victim in state.membership.gone or (d.notice and now >= d.at)):
            d.known = now
        for command in commands:
            d.anew = d.anew or (isinstance(command, Send) and isinstance(command.message, HoldState))
            if isinstance(command, Send) and isinstance(command.message, SendPlan) and d.planned is None:
                plan = command.message.plan
                if plan.has(d.cell) and plan.at(d.cell).owner != d.victim:
                    d.planned, d.epoch, d.heir = now, plan.epoch, plan.at(d.cell).owner
        if d.planned is not None and isinstance(event, Received):
            message = event.message
            if (
                isinstance(message, PlanApplied)
                and event.worker == d.heir
                and message.epoch >= d.epoch
                and not d.applied
            ):
                d.applied = now
            if isinstance(message, TakenOver) and message.cell == d.cell:  # or of a spare worker, after the heir
                d.taken, d.reported, d.heir = now, message, event.worker


async def disturb(place: Lab, document: Any, count: int, *, notice: bool, seed: int) -> dict[str, Any]:
    """Take `count` workers from a job, one by one. Return the takeovers' figures and the cores used by others."""
    job = Job(place, document, main="_recorder:record")
    taker = Taker(job, count, notice, random.Random(seed))
    job.look = taker.look
    async with place.watched() as others:
        await job.run()
    done = read(job.folder)
    figures = [planned(d, job.committed, done) if notice else unplanned(d, job.committed, done) for d in taker.found]
    return {"takeovers": figures, "others": others[0]}


def unplanned(d: Disturbance, committed: dict[int, float], done: list[Done]) -> dict[str, Any]:
    """Return the figures of a kill, with times in milliseconds. The heir is the cell's new owner.

    pause: from the kill until the heir has applied the plan and repeated the victim's instructions of uncommitted
    steps. work: the heir's instructions from the plan until the commit. idle: from the plan until the heir's last
    instruction of the cell, minus work. tail: from then until the commit. Only `_steps` if the step began anew.
    """
    if d.anew:
        return _steps(d, committed, at=d.at)
    assert d.known is not None
    assert d.planned is not None
    assert d.applied is not None
    repeated = [x for x in done if x.worker != d.victim and x.cell == d.cell and x.name in WORK and x.end > d.planned]
    first = min((x.step for x in repeated), default=d.step)
    victims = [x for x in done if x.worker == d.victim and x.cell == d.cell and x.name in WORK and x.step >= first]
    before = {_work(x) for x in victims}
    lost = [x for x in repeated if _work(x) in before]
    caught_up = max([d.applied, *(x.end for x in lost)])
    ends = [d.at, d.known, d.planned, d.applied, caught_up]
    committed_at = min(time for time in committed.values() if time > d.at)
    own = [x for x in done if x.worker == d.heir and x.name in WORK and d.planned < x.end < committed_at]
    work = sum(x.end - max(x.start, d.planned) for x in own)
    last = max((x.end for x in own if x.cell == d.cell), default=d.planned)
    phases = dict(zip(("detect", "decide", "reform", "recompute"), _gaps_ms(ends), strict=True))
    return {
        **phases,
        "pause": 1e3 * (caught_up - d.at),
        "without_recompute": 1e3 * (d.applied - d.at),
        "work": 1e3 * work,
        "idle": 1e3 * (last - d.planned - work),
        "tail": 1e3 * (committed_at - last),
        "forwards": sum(x.name == "Forward" for x in lost),
        "backwards": sum(x.name in BACKWARDS for x in lost),
        **_steps(d, committed, at=d.at),
        **_told(d),
    }


def _work(done: Done) -> tuple[str, Cell, int, int]:
    """Return the key by which an instruction of the heir equals one of the victim: name, cell, step and microbatch. A
    whole backward equals the first part of a split one.
    """
    name, cell, step, microbatch = done.what
    return BACKWARDS[0] if name in BACKWARDS else name, cell, step, microbatch


def planned(d: Disturbance, committed: dict[int, float], done: list[Done]) -> dict[str, Any]:
    """Return the figures of a notice, with times in milliseconds. pause: from the last backward before the takeover to
    the cell's first forward after it, minus the median of that time in calm steps.
    """
    assert d.planned is not None
    first = min(x.step for x in done if x.worker == d.heir and x.cell == d.cell and x.name in WORK and x.end > d.at)
    calm = [_idle(d.cell, step, done) for step in range(d.step - CALM + 2, d.step)]
    pause = _idle(d.cell, first, done) - median(calm)
    boundary = committed[first - 1]
    return {
        "decide": 1e3 * (d.planned - d.at),
        "until_boundary": 1e3 * (boundary - d.planned),
        "pause": 1e3 * pause,
        "usual": 1e3 * median(calm),
        "step_before": 1e3 * (boundary - committed[first - 2] - d.calm),
        **_steps(d, committed, at=boundary),
        **_told(d),
    }


def _idle(cell: Cell, step: int, done: list[Done]) -> float:
    start = min(x.start for x in done if x.cell == cell and x.step == step and x.name == "Forward")
    return start - max(x.end for x in done if x.step == step - 1 and x.name in BACKWARDS)


def _steps(d: Disturbance, committed: dict[int, float], at: float) -> dict[str, float]:
    """Compare the first step committed after `at`, and the next step, with a calm step. Times are in milliseconds."""
    k = min(step for step, time in committed.items() if time > at)
    affected, after = committed[k] - committed[k - 1], committed[k + 1] - committed[k]
    return {
        "stage": d.cell.stage,
        "moment": (at - committed[k - 1]) / d.calm,
        "calm": 1e3 * d.calm,
        "affected": 1e3 * affected,
        "ratio": affected / d.calm,
        "next_ratio": after / d.calm,
        "delay": 1e3 * (affected - d.calm),
    }


def _told(d: Disturbance) -> dict[str, Any]:
    assert d.reported is not None
    keys = ("reform_ms", "recompute_ms", "forwards", "backwards")
    told = {key: round(getattr(d.reported, key), 2) for key in keys}
    return {"reported": told, "disturbance": {**asdict(d), "reported": None}}


def _gaps_ms(moments: Sequence[float]) -> list[float]:
    return [1e3 * (b - a) for a, b in pairwise(moments)]
