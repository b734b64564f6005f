"""The choice of how many workers are worth their price (`elastic.objective: Value`), and which ones to give back.

The job does not replace a worker that it gives back. See docs/design/grids.md.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from statistics import median
from typing import Final

from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.grids import choosing
from bamboo_core.coordinator.records.grids import Exposure, Holding
from bamboo_core.coordinator.records.workers import Notice
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.job.spec import fewest_workers, gives_back, stabilization_seconds, wanted_workers, whole_workers
from bamboo_core.planning.plan import Peer, WorkerId
from bamboo_core.planning.splits.resplit_plans import Grid, grid_of
from bamboo_core.planning.steps.grid_rates import GridRates
from bamboo_core.text import count

LOOK_SECONDS: Final = 1.0  # between choices
AS_FAST: Final = 0.95  # share of the full number's speed that a choice must reach
TOO_SLOW: Final = 0.88  # share below which more workers are requested again; estimates of grids err by that much
LEAST_CHANCE: Final = 1e-3  # smallest chance of a number of missing workers that counts
SPREAD: Final = 4.0  # standard deviations around the mean of missing workers that count
LEAST_LOSSES: Final = 1e-6  # smallest expected losses of a worker until its replacement
MOST_COMPARED: Final = 24  # numbers of workers compared in a choice
UNLIKE: Final = 0.05  # share by which prices must differ to matter
USUAL_LOSSES, USUAL_HOURS = 1.0, 20.0  # prior for the workers of each zone
LEAST_SPAN: Final = 0.1  # seconds: shortest pause or outlook
UNPRICED: Final = 1.0  # price per hour of each worker if none is known


# observations


def priced(turn: Turn, prices: Mapping[WorkerId, float], more: tuple[tuple[float, int], ...]) -> None:
    """Record the prices that the shell reports."""
    known = turn.state.holding
    if (prices, more) != (known.prices, known.more):
        turn.put(replace(known, prices=dict(prices), more=more))


def edited(turn: Turn) -> None:
    """Forget all of `holding` but prices and the zones' losses, unless the edited job has `objective: Value`."""
    if not gives_back(turn.state.spec):
        known = turn.state.holding
        turn.put(Holding(prices=known.prices, more=known.more, zones=known.zones))


def _each(more: tuple[tuple[float, int], ...], number: int) -> list[float]:
    """Return the hourly prices of the next `number` workers. more: (price, number of workers) pairs, in the order in
    which workers come; further workers have the last price.
    """
    found = [price for price, count in more for _ in range(min(count, number))][:number]
    return found + [more[-1][0]] * (number - len(found))


def seen(state: CoordinatorState, now: float) -> Holding:
    """Return `state.holding` with the workers that stay now; add losses and hours of former ones to their zones."""
    known = state.holding
    staying = {w: r.peer.zone for w, r in state.workers.items() if state.stays(w)}
    if staying.keys() == known.staying.keys():
        return known
    zones = dict(known.zones)
    for worker, (zone, since) in known.staying.items():
        if worker not in staying:
            was = zones.get(zone, Exposure())
            lost = was.losses + _was_lost(state, worker)
            zones[zone] = Exposure(losses=lost, hours=was.hours + (now - since) / 3600)
    workers = {w: known.staying.get(w, (zone, now)) for w, zone in staying.items()}
    return replace(known, staying=workers, zones=zones)


def _was_lost(state: CoordinatorState, worker: WorkerId) -> bool:
    """Return whether a worker that no longer stays counts as lost: neither given back nor replaced as a straggler."""
    notice = state.membership.leaving.get(worker)
    return notice is None or not (notice.spared or notice.replaced)


def hazard(state: CoordinatorState, zone: str, now: float) -> float:
    """Return a zone's expected losses per worker and hour: near the prior at first, later near the observed rate."""
    known = state.holding
    was = known.zones.get(zone, Exposure())
    hours = was.hours + sum(now - since for place, since in known.staying.values() if place == zone) / 3600
    return (was.losses + USUAL_LOSSES) / (hours + USUAL_HOURS)


def missing_share(state: CoordinatorState, now: float) -> float:
    """Return the expected share, 0 to 1, of wanted workers that are lost and not replaced yet.

    It is rounded to steps, so that it does not change all the time.
    """
    refills = state.grids.refills
    zones = Counter(zone for zone, _ in state.holding.staying.values()) or Counter([""])
    mean = sum(number * hazard(state, zone, now) for zone, number in zones.items()) / zones.total()
    losses = mean / 3600 * (median(refills) if refills else choosing.USUAL_REFILL)  # until it is replaced
    losses = math.exp2(round(4 * math.log2(max(LEAST_LOSSES, losses))) / 4)
    return losses / (1 + losses)


def _missing(held: int, share: float) -> Iterator[tuple[int, float]]:
    """Yield each likely number of missing workers of `held`, and its probability. share: one worker's probability."""
    mean = held * share
    around = 1 + SPREAD * math.sqrt(mean * (1 - share))
    fewest, most = max(0, math.floor(mean - around)), min(held, math.ceil(mean + around))
    for lost in range(fewest, most + 1):
        ways = math.lgamma(held + 1) - math.lgamma(lost + 1) - math.lgamma(held - lost + 1)
        chance = math.exp(ways + lost * math.log(share) + (held - lost) * math.log1p(-share))
        if chance > LEAST_CHANCE:
            yield lost, chance


# the number worth its price


def to_have(state: CoordinatorState) -> int:
    """Return the number of workers that the job should have, with standbys and any extra one to replace a straggler."""
    wanted, target = wanted_workers(state.spec), state.holding.target
    if gives_back(state.spec) and target is not None:
        wanted = min(wanted, target + state.spec.standby.workers)
    return wanted + (state.stragglers.asked_at is not None)


def fewest_to_begin(state: CoordinatorState) -> int:
    """Return the fewest workers with which the job can begin. With known layers, elastic jobs need a grid that fits."""
    spec = state.spec
    fewest = fewest_workers(spec)
    rates = choosing.rates_of(state) if spec.elastic else None
    if rates is not None:
        most = whole_workers(spec)
        fewest = next((n for n in range(fewest, most) if rates.best(n)), most)
    return fewest


class Worth:
    """The expected speed, hourly price and value (speed per price) of each possible number of workers."""

    def __init__(self, state: CoordinatorState, rates: GridRates, now: float) -> None:
        self._state, self._rates = state, rates
        self._share = missing_share(state, now)
        self._speeds: dict[int, float] = {}  # samples/s by number of present workers
        known, spec = state.holding, state.spec
        prices = sorted(known.prices[w] for w in known.staying if w in known.prices)
        more = known.more or ((prices[len(prices) // 2] if prices else UNPRICED, 1),)
        self._sums = list(accumulate(prices, initial=0.0))
        self._more = list(accumulate(_each(more, wanted_workers(spec)), initial=0.0))
        self.batch = spec.training.global_batch_size
        self.most, self.held = whole_workers(spec), known.target
        # inputs of a choice; times are rounded to steps, so that the key does not change all the time
        spans = (choosing.outlook(state, now), state.splits.pause or 0.0)
        steps = tuple(round(2 * math.log2(max(LEAST_SPAN, span))) for span in spans)
        self.key = (
            rates,
            tuple(choosing.known_steps(state, rates).items()),
            choosing.scale(state, rates),
            grid_of(state.current_plan),
            self._share,
            more,
            tuple(prices),
            self.most,
            self.held,
            spec.standby.workers,
            steps,
        )

    def speed(self, held: int) -> float:
        """Return the mean samples per second with `held` workers, of which some may be lost and not replaced yet."""
        chances = dict(_missing(held, self._share))
        return sum(chance * self._undisturbed(held - lost) for lost, chance in chances.items()) / sum(chances.values())

    def _undisturbed(self, workers: int) -> float:
        if workers not in self._speeds:
            found = choosing.best(self._state, self._rates, workers) if workers > 0 else None
            self._speeds[workers] = self.batch / found.seconds if found else 0.0
        return self._speeds[workers]

    def price(self, held: int) -> float:
        """Return the price per hour of `held` workers and standbys: the cheapest present ones, then further ones."""
        held += self._state.spec.standby.workers
        here = min(held, len(self._sums) - 1)
        return self._sums[here] + self._more[held - here]

    def least(self) -> float:
        """Return the samples per second that a choice must reach: nearly the speed of the largest number of workers."""
        return AS_FAST * self.speed(self.most)

    def suffices(self, held: int) -> bool:
        """Return whether `held` workers are fast enough for the job to keep them, within the error of the estimates."""
        return self.speed(held) >= TOO_SLOW * self.speed(self.most)

    def value(self, held: int) -> float:
        price = self.price(held)
        return self.speed(held) / price if price else self.speed(held)


def worth_most(state: CoordinatorState, worth: Worth, rates: GridRates, now: float) -> int | None:
    """Return the number of workers, without standbys, with the best speed for its price; None if no grid fits.

    Candidates train nearly as fast as the largest number would. The present target stays while it is fast enough and
    no other number is clearly better.
    """
    most, held, top = worth.most, worth.held, worth.speed(worth.most)
    if not top:
        return None
    fewest = _fewest(worth, most, worth.least())
    best = max(_compared(worth, fewest, most, top), key=lambda number: (worth.value(number), -number))
    if held is None or held > most or not worth.suffices(held):
        return best
    share = 1 - _pause_of(state, rates, best) / choosing.outlook(state, now)
    return best if share * worth.value(best) > (1 + choosing.WORTH) * worth.value(held) else held


def _fewest(worth: Worth, most: int, speed: float) -> int:
    """Return the smallest number of workers that reaches this speed (binary search)."""
    fewer, enough = 0, most
    while enough - fewer > 1:
        middle = (fewer + enough) // 2
        if worth.speed(middle) >= speed:
            enough = middle
        else:
            fewer = middle
    return enough


def _compared(worth: Worth, fewest: int, most: int, top: float) -> Iterator[int]:
    """Yield `fewest` and larger numbers of workers that could be worth as much, at most MOST_COMPARED in all."""
    least = worth.value(fewest)
    able = [n for n in range(fewest, most + 1) if top >= least * worth.price(n)] or [fewest]
    yield from able[:: -(-len(able) // MOST_COMPARED)]


def _pause_of(state: CoordinatorState, rates: GridRates, workers: int) -> float:
    found = choosing.best(state, rates, workers)
    changes = found is not None and found.grid != grid_of(state.current_plan)
    return choosing.pause(state, rates, found.grid) if found is not None and changes else 0.0


def resume(turn: Turn) -> None:
    """Hold as many workers as the grid has cells after a restart of the coordinator, until `aim` chooses again.

    Does nothing without `objective: Value`.
    """
    known, plan = turn.state.holding, turn.state.plan
    if gives_back(turn.state.spec) and plan is not None:
        turn.put(replace(known, target=grid_of(plan).cells))


def aim(turn: Turn, rates: GridRates) -> None:
    """Change the number of workers to hold if another one has been better for `stabilizationSeconds`."""
    state, known = turn.state, turn.state.holding
    if turn.now < known.looked_at + LOOK_SECONDS:
        return
    worth = Worth(state, rates, turn.now)
    number = known.best[1] if known.best and known.best[0] == worth.key else worth_most(state, worth, rates, turn.now)
    known = replace(known, best=(worth.key, number), looked_at=turn.now)
    if number is None or number == known.target:
        changed = replace(known, aim=None)
    elif known.aim is None or known.aim[0] != number:
        changed = replace(known, aim=(number, turn.now))
    elif turn.now - known.aim[1] >= stabilization_seconds(state.spec):
        changed = replace(known, aim=None, target=number, reason=_reason(worth, number))
        turn.do(Emit("WorkersChosen", changed.reason))
    else:
        changed = known
    turn.put(changed)


def _reason(worth: Worth, number: int) -> str:
    if number == worth.most:
        return f"all of {count(worth.most, 'worker')} are worth their price"
    speed = worth.speed(number) / worth.speed(worth.most)
    price = worth.price(number) / max(1e-12, worth.price(worth.most))
    at_most = f"{number} of at most {count(worth.most, 'worker')}"
    return f"{at_most} are held: {speed:.2f} of the speed for {price:.2f} of the price"


def counted(state: CoordinatorState, workers: int) -> int:
    """Return the number of workers, at most `workers`, for which a grid is chosen; all others leave or stand by."""
    target = state.holding.target
    return workers if target is None or not gives_back(state.spec) else min(workers, target)


# which workers to give back


def _order(state: CoordinatorState, worker: WorkerId, now: float) -> tuple[float, float, int, str]:
    """Return a worker's sort key: by price, then by its zone's rate of losses. The job gives back the last workers."""
    known = state.holding
    price = known.prices.get(worker, known.more[0][0] if known.more else UNPRICED)
    zone = state.workers[worker].peer.zone if worker in state.workers else ""
    return price, hazard(state, zone, now), len(worker), worker


def is_too_large(state: CoordinatorState) -> bool:
    """Return whether the grid has more cells than the target number of workers, so that owners must be given back."""
    cells = grid_of(state.current_plan).cells
    return cells > counted(state, cells)


def kept(state: CoordinatorState, peers: list[Peer], grid: Grid, now: float) -> list[Peer]:
    """Return the workers that stay when others are given back: owners of stages are preferred, then cheap workers."""
    number = max(grid.cells, counted(state, len(peers)))
    if number >= len(peers) or state.plan is None:
        return peers
    runs = {state.plan.at(cell).owner for cell in state.plan.cells()}
    first = sorted(peers, key=lambda peer: (peer.worker not in runs, *_order(state, peer.worker, now)))
    chosen = {peer.worker for peer in first[:number]}
    return [peer for peer in peers if peer.worker in chosen]


def picks(state: CoordinatorState, then: Grid) -> bool:
    """Return whether a change to grid `then` should give back the most expensive workers, which needs a new split."""
    known = state.holding
    prices = [known.prices[w] for w in known.staying if w in known.prices]
    if not is_too_large(state) or then.cells >= grid_of(state.current_plan).cells or len(prices) < 2:
        return False
    return max(prices) > (1 + UNLIKE) * min(prices)


def give_back_surplus(turn: Turn) -> bool:
    """Give notice to workers that own no cell, at most as many as exceed `to_have`. Return whether any got a notice."""
    state, plan = turn.state, turn.state.plan
    if not gives_back(state.spec) or state.holding.target is None or plan is None:
        return False
    staying = [w for w in state.workers if state.stays(w)]
    surplus = len(staying) - to_have(state)
    if surplus <= 0:
        return False
    runs = {plan.at(cell).owner for cell in plan.cells()}
    idle = sorted((w for w in staying if w not in runs), key=lambda w: _order(state, w, turn.now), reverse=True)
    for worker in idle[:surplus]:
        turn.put(turn.state.membership.with_notice(worker, Notice(final=True, spared=True)))
        why = state.holding.reason or f"{count(to_have(state), 'worker')} are held"
        turn.do(Emit("GivenBack", f"{worker} is given back: {why}"))
    return bool(idle)
