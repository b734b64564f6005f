"""Choice of the grid for the available workers: at a start or restore, after a cut, and while the job trains."""

from functools import lru_cache
from typing import Final

from bamboo_core.coordinator.events import Emit, Outcome
from bamboo_core.coordinator.grids import choosing, holding, noise
from bamboo_core.coordinator.records.grids import StepTime
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits.worker_speeds import estimate, measurements
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import RedundancyMode, gives_back, schedules, whole_workers
from bamboo_core.planning.gradient_groups import most_microbatches
from bamboo_core.planning.splits.resplit_plans import Grid, grid_of
from bamboo_core.planning.splits.speeds import MOST_MICROBATCHES, Ranges, speeds
from bamboo_core.planning.steps.grid_rates import (
    ALIKE,
    GridRate,
    GridRates,
    bounded_grids,
    is_within_bounds,
    may_do_without,
)
from bamboo_core.text import count

SHOWN: Final = 4  # grids in a sentence
AGAIN_STEPS: Final = 32  # after which a step time is recorded again, even if it is about the same
NO_ROOM: Final = ", without copies of stages, for which no grid has room"


def watch(turn: Turn) -> None:
    """Update an elastic job's measurements and, except before layers are known or during a re-split, its pending change
    of the grid (`grids.resize`). For another job with `redundancy.mode: Auto`, only estimate step times, if not done.
    """
    state = turn.state
    if state.spec.elastic is None:
        if state.spec.redundancy.mode is RedundancyMode.AUTO and state.grids.rates is None:
            keep_rates(turn)
        return
    staying = state.staying
    _note(turn, staying)
    _learn(turn)
    state, rates = turn.state, turn.state.grids.rates
    if rates is None or state.splits.resplit is not None:
        return
    better = _best_measured(turn, rates) if choosing.is_measured(state) else _best_guess(state, rates)
    grids = turn.state.grids
    if better is None:
        turn.put(replace(grids, resize=None))
    else:
        since = grids.resize[1] if grids.resize else turn.now  # another grid's waiting time counts for this one
        turn.put(replace(grids, resize=(better.grid, since), expected=better))


def keep_rates(turn: Turn) -> None:
    """Compute the estimates of step times by grid, and keep them in the state for later decisions."""
    grids = turn.state.grids
    turn.put(replace(grids, rates=choosing.rates_of(turn.state)))


def _best_measured(turn: Turn, rates: GridRates) -> GridRate | None:
    """Return the grid to change to, by measured times of layers; the present one if only its split has to change; None
    if no grid fits, or if no change is necessary or pays. Also call `holding.aim` for `objective: Value`, and report an
    edit that no grid fits.
    """
    state = turn.state
    assert state.spec.elastic is not None
    if gives_back(state.spec) and grid_of(state.current_plan) in state.grids.measured:
        holding.aim(turn, rates)
        state = turn.state
    counted = holding.counted(state, state.staying)
    found = choosing.best(state, rates, counted)
    _report_if_no_grid_fits_the_edit(turn, rates, counted, found)
    if found is None or (found.grid == grid_of(state.current_plan) and not _is_split_too_large(state)):
        return None
    return found if _has_to_change(state) else _better(turn, found, choosing.now_expected(state, rates))


def _best_guess(state: CoordinatorState, rates: GridRates) -> GridRate | None:
    """Return the grid of `_guess` with the present schedule; None if none fits or it has as many pipelines as now."""
    grid = grid_of(state.current_plan)
    found = _guess(state, rates, holding.counted(state, state.staying))
    if found is None or found.pipelines == grid.pipelines:
        return None
    return choosing.rate(state, rates, found._replace(schedule=grid.schedule))


def _guess(state: CoordinatorState, rates: GridRates, workers: int) -> Grid | None:
    """Return the grid with the most pipelines that fits the workers and their memory, for use until layers are
    measured; None if no grid fits, or if the manifest does not set the number of stages.
    """
    if state.spec.topology.chooses_stages:
        return None
    grids = list(bounded_grids(state.spec, len(rates.figures.layers), workers))
    possible = [grid for grid in grids if rates.fits(grid)]
    if not possible and may_do_without(state.spec):
        possible = [grid for grid in grids if rates.without_copies().fits(grid)]
    return max(possible, key=lambda grid: grid.pipelines, default=None)


def _note(turn: Turn, staying: int) -> None:
    """Record the number of ready workers without a notice and, for `objective: Value`, which workers have no notice."""
    state = turn.state
    leaving = [w for w in state.holding.staying if w in state.noticed]
    spared = sum(1 for w in leaving if state.membership.leaving[w].spared and state.workers[w].ready)
    if gives_back(state.spec):
        turn.put(holding.seen(state, turn.now))
    turn.put(state.grids.noted(staying, turn.now, holding.to_have(turn.state), spared))


def _has_to_change(state: CoordinatorState) -> bool:
    """Return whether the job must change even to a slower grid: an edit excludes the present one, workers that run
    stages are to be given back, or workers lack memory for the present split.
    """
    outside = not is_within_bounds(state.spec, grid_of(state.current_plan))
    return outside or holding.is_too_large(state) or _is_split_too_large(state)


def _is_split_too_large(state: CoordinatorState) -> bool:
    """Return whether workers lack memory for the present split, with the replicas that the grid should have."""
    plan = state.current_plan
    return not has_room(state, grid_of(plan), plan.stages)


def _better(turn: Turn, then: GridRate, seconds: float) -> GridRate | None:
    state, rates = turn.state, turn.state.grids.rates
    assert rates is not None
    tries = state.grids.tries
    if tries and turn.now < tries[-1] + noise.rest(len(tries)):
        return None
    stopped, until = choosing.pause(state, rates, then.grid), choosing.outlook(state, turn.now)
    margin = 0.0 if choosing.is_short(state) else choosing.WORTH + noise.doubt(state.grids.taken)
    return then if choosing.pays(seconds, then.seconds, stopped, until, margin) else None


def _learn(turn: Turn) -> None:
    """Record the present times of layers and steps, and calibrate the estimates with them."""
    state, plan = turn.state, turn.state.current_plan
    known = state.grids.on(grid_of(plan), plan.origin, state.step, turn.now)
    due = state.step > known.heard and state.step >= known.looked + _steps_apart(state)
    if (due or not known.looks) and (costs := _look(state)):
        known = known.looking(costs, state.step)
    if choosing.is_short(state):
        known = known.disturbed(state.step).lacking(state.step, turn.now)
    elif state.step > known.heard:
        taken = state.progress.step_seconds[-1:] if choosing.is_undisturbed(state) else ()
        known = known.stepped(state.step, *taken)
    turn.put(known)
    rates = choosing.rates_of(turn.state)
    seconds = choosing.measured(turn.state)
    if rates is not None and seconds is not None and choosing.is_measured(turn.state):
        before = known.measured.get(grid_of(plan))
        if before is None or abs(seconds / before.seconds - 1) > ALIKE or state.step - before.step >= AGAIN_STEPS:
            found = StepTime(seconds=seconds, work=rates.work, step=state.step, at=turn.now)
            fresh = {grid: one for grid, one in known.measured.items() if noise.weight(found.at - one.at)}
            known = replace(known, measured={**fresh, grid_of(plan): found})
            factor = choosing.calibrated(turn.state, rates)
            if factor != known.network:
                rates = choosing.rates_of(turn.state, factor)
            known = replace(known, network=factor)
    turn.put(replace(known, rates=rates))


def _look(state: CoordinatorState) -> tuple[float, ...] | None:
    """Return each layer's seconds per microbatch; None until all stages are timed, or while layers or layout change."""
    plan = state.current_plan
    if state.phase != "Running" or len(plan.layouts) > 1 or plan.sources:
        return None
    found = estimate(state, speeds(measurements(state)))
    return found.costs if found is not None else None


def _steps_apart(state: CoordinatorState) -> int:
    """Return the number of steps after which workers with the most microbatches report a median of only new ones."""
    training = state.spec.training
    return -(-MOST_MICROBATCHES // most_microbatches(training, grid_of(state.current_plan).pipelines))


def is_due(state: CoordinatorState, now: float) -> bool:
    """Return whether the pending change of the grid (`resize`) is due: necessary, or worthwhile for long enough."""
    grids, rates = state.grids, state.grids.rates
    if grids.resize is None or rates is None or grids.expected is None:
        return False
    if _has_to_change(state):
        return True  # an edit asks for it, or the choice of workers has waited already
    stopped = choosing.pause(state, rates, grids.expected.grid)
    seconds = choosing.now_expected(state, rates)
    return now - grids.resize[1] >= choosing.wait(state, grids.expected, seconds, stopped, now)


def splits_anew(state: CoordinatorState) -> bool:
    """Return whether the pending change of the grid (`resize`) also splits layers anew; False without one."""
    rates = choosing.rates_of(state)
    if state.grids.resize is None or rates is None:
        return False
    grid = state.grids.resize[0]
    return not choosing.keeps_split(state, rates, grid) or holding.picks(state, grid)


def next_grid(state: CoordinatorState, workers: int) -> Grid:
    """Return the grid on which a number of workers continue from a cut: in elastic jobs that of `grid_for`, if any;
    else the present one. A cut for speed alone also keeps the present grid, if each cell gets a worker.
    """
    grid = grid_of(state.current_plan)
    balances = state.splits.resplit is not None and state.splits.resplit.stages is not None
    if state.spec.elastic is None or (balances and workers >= grid.cells):
        return grid
    return grid_for(state, workers) or grid


def grid_for(state: CoordinatorState, workers: int) -> Grid | None:
    """Return the best grid for a number of workers; None if no grid fits, or while the layers are unknown. Until layers
    are measured, the grid has as many pipelines as fit (`_guess`) if the manifest sets the number of stages; else the
    layers' counted operations decide.
    """
    rates = choosing.rates_of(state)
    if rates is None:
        return None
    counted = holding.counted(state, workers)
    if not choosing.is_measured(state) and not state.spec.topology.chooses_stages:
        return _guess(state, rates, counted)
    found = choosing.best(state, rates, counted)
    return found.grid if found is not None else None


def report_no_grid(turn: Turn, workers: int) -> None:
    """Report why no grid fits the job's workers, if that is new; fail the job if more workers would not help."""
    state, rates = turn.state, choosing.rates_of(turn.state)
    if rates is None:
        return
    why, enough = _why_none(rates, workers)
    if enough is None:
        turn.finish(Outcome.FAILED, "NoGridFits", why)
    elif (text := f"{why}; a grid of {count(enough, 'worker')} fits") != state.grids.announced:
        turn.put(replace(state.grids, announced=text))
        turn.do(Emit("NoGridFits", text, warning=True))


def _report_if_no_grid_fits_the_edit(turn: Turn, rates: GridRates, workers: int, found: GridRate | None) -> None:
    """Report why the job stays on a grid that an edit excludes, if no grid fits the edit and that is new."""
    state = turn.state
    if found is not None or is_within_bounds(state.spec, grid_of(state.current_plan)):
        turn.put(replace(state.grids, unmet=""))
        return
    why, enough = _why_none(rates, workers)
    text = f"after the edit {why}; the job stays on {_described(grid_of(state.current_plan), state)}"
    if enough is not None:
        text += f", and a grid of {count(enough, 'worker')} fits"
    if text != state.grids.unmet:
        turn.put(replace(state.grids, unmet=text))
        turn.do(Emit("NoGridFits", text, warning=True))


@lru_cache(maxsize=16)
def _why_none(rates: GridRates, workers: int) -> tuple[str, int | None]:
    """Return why no grid fits, and a larger number of workers for which one fits; None if no such number is found."""
    spec, layers = rates.spec, len(rates.figures.layers)
    most = whole_workers(spec)
    tried = [min(max(workers, 1) << doubled, most) for doubled in range(most.bit_length() + 1)]
    enough = next((number for number in tried if number > workers and rates.best(number)), None)
    held = workers if enough else max(workers, most)
    if next(bounded_grids(spec, layers, held), None) is None:
        return f"a model of {count(layers, 'layer')} has no grid of {held} workers within the bounds of elastic", enough
    room = f"{(rates.memory or 0) / 1e9:.1f} GB"
    return f"no grid of {count(held, 'worker')} fits in devices with {room}", enough


def split_of(state: CoordinatorState, grid: Grid) -> Ranges | None:
    """Return the layers of each stage; None if the job is not elastic, layers are unknown, or no split fits."""
    rates = choosing.rates_of(state) if state.spec.elastic else None
    return rates.as_run(grid).split(grid) if rates is not None else None


def has_room(state: CoordinatorState, grid: Grid, split: Ranges) -> bool:
    """Return whether workers have the memory for a split; True if that is unknown, or if the job is not elastic."""
    rates = choosing.rates_of(state) if state.spec.elastic else None
    return rates is None or rates.as_run(grid).has_room(grid, split)


def report_choice(turn: Turn, grid: Grid) -> None:
    """Report the chosen grid (GridChosen); once layers are measured, only if it fits, and with expected speeds."""
    state, rates = turn.state, choosing.rates_of(turn.state)
    workers = state.staying
    text = f"{_described(grid, state)} for {count(workers, 'worker')}"
    if not choosing.redundancy(state, state.current_plan).kept and state.spec.redundancy.kept:
        protected = grid.pipelines > state.spec.redundancy.kept
        text += ", whose pipelines hold each other's copies" if protected else NO_ROOM
    if not choosing.is_measured(state):
        _chosen(turn, f"{text}: to begin with; what steps take is measured")
        return
    chosen = choosing.rate(state, rates, grid) if rates is not None else None
    if rates is None or chosen is None:
        return
    turn.put(replace(state.grids, expected=chosen))
    found = choosing.ranked(state, rates, holding.counted(state, workers), SHOWN + 1)
    others = [one for one in found if one.grid.stages != grid.stages][:SHOWN]
    batch = state.spec.training.global_batch_size
    rated = ", ".join(f"{_described(one.grid, state)} {batch / one.seconds:.3g}" for one in others)
    text += f": {batch / chosen.seconds:.3g} samples/s expected"
    _chosen(turn, text + (f"; of others: {rated}" if rated else ""))


def _described(grid: Grid, state: CoordinatorState) -> str:
    """Describe the grid, with its schedule if it has several stages and the manifest allows another schedule."""
    allowed = schedules(state.spec)
    chosen = grid.stages > 1 and (len(allowed) > 1 or grid.schedule not in allowed)
    return f"{grid.name} by {grid.schedule}" if chosen else grid.name


def _chosen(turn: Turn, text: str) -> None:
    turn.put(replace(turn.state.grids, announced=text))
    turn.do(Emit("GridChosen", text))
