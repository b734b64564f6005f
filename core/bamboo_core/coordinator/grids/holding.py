"""Which number of workers is worth its price (`elastic.objective: Value`), and which of them go. Pure.

A worker that adds less than it costs is given back, and no other is asked for in its place. See docs/design/grids.md.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from statistics import median
from typing import Final

from bamboo_core.coordinator.events import Emit
from bamboo_core.coordinator.grids import choosing
from bamboo_core.coordinator.grids.record import Exposure, Holding
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.coordinator.workers.record import Notice
from bamboo_core.job.spec import fewest_workers, gives_back, stabilization_seconds, wanted_workers, whole_workers
from bamboo_core.planning.plan import Peer, WorkerId
from bamboo_core.planning.splits.resplit import Grid, grid_of
from bamboo_core.planning.steps.grid_rates import GridRates
from bamboo_core.text import count

LOOK_SECONDS: Final = 1.0  # from one choice to the next
AS_FAST: Final = 0.95  # of what all workers that the job may have would train: so fast is what is chosen, at least
TOO_SLOW: Final = 0.88  # of that: more are asked for again below it, since estimates of grids are off by as much
LEAST_CHANCE: Final = 1e-3  # of a number of missing workers that is looked at
SPREAD: Final = 4.0  # standard deviations, within which numbers of missing workers are looked at
LEAST_LOSSES: Final = 1e-6  # of a worker, until another one has come
MOST_COMPARED: Final = 24  # numbers of workers
UNLIKE: Final = 0.05  # of a price: by which others differ from it
USUAL_LOSSES, USUAL_HOURS = 1.0, 20.0  # of a zone's workers, before any are counted
LEAST_SPAN: Final = 0.1  # seconds, of a pause or an outlook
UNPRICED: Final = 1.0  # money an hour of all workers if nobody says what they cost


# what is known


def priced(turn: Turn, prices: Mapping[WorkerId, float], more: tuple[tuple[float, int], ...]) -> None:
    """The shell says what workers cost."""
    known = turn.state.holding
    if (prices, more) != (known.prices, known.more):
        turn.put(replace(known, prices=dict(prices), more=more))


def edited(turn: Turn) -> None:
    """All workers may be held from now on, whatever they are worth."""
    if not gives_back(turn.state.spec):
        known = turn.state.holding
        turn.put(Holding(prices=known.prices, more=known.more, zones=known.zones))


def _each(more: tuple[tuple[float, int], ...], number: int) -> list[float]:
    """The prices of so many that would come."""
    found = [price for price, count in more for _ in range(min(count, number))][:number]
    return found + [more[-1][0]] * (number - len(found))


def seen(state: CoordinatorState, now: float) -> Holding:
    """With who is there now, and what became of those who are not any more."""
    known = state.holding
    staying = {w: r.peer.zone for w, r in state.workers.items() if state.stays(w)}
    if staying.keys() == known.there.keys():
        return known
    zones = dict(known.zones)
    for worker, (zone, since) in known.there.items():
        if worker not in staying:
            was = zones.get(zone, Exposure())
            lost = was.losses + _was_lost(state, worker)
            zones[zone] = Exposure(losses=lost, hours=was.hours + (now - since) / 3600)
    there = {w: known.there.get(w, (zone, now)) for w, zone in staying.items()}
    return replace(known, there=there, zones=zones)


def _was_lost(state: CoordinatorState, worker: WorkerId) -> bool:
    """Not given back, and not replaced. How it ended does not count: that is often known only later, or never."""
    notice = state.membership.leaving.get(worker)
    return notice is None or not (notice.spared or notice.replaced)


def hazard(state: CoordinatorState, zone: str, now: float) -> float:
    """Return how many of a zone's workers the job loses in a worker's hour there: with few hours seen about what is
    usual, with many what the job has seen.
    """
    known = state.holding
    was = known.zones.get(zone, Exposure())
    hours = was.hours + sum(now - since for place, since in known.there.values() if place == zone) / 3600
    return (was.losses + USUAL_LOSSES) / (hours + USUAL_HOURS)


def missing_share(state: CoordinatorState, now: float) -> float:
    """The share, from 0 to 1, of the workers that are wanted and are missing, because no others have come in their
    place yet. It goes in steps, so that it does not become another one all the time.
    """
    refills = state.grids.refills
    zones = Counter(zone for zone, _ in state.holding.there.values()) or Counter([""])
    mean = sum(number * hazard(state, zone, now) for zone, number in zones.items()) / zones.total()
    losses = mean / 3600 * (median(refills) if refills else choosing.USUAL_REFILL)  # until it is replaced
    losses = math.exp2(round(4 * math.log2(max(LEAST_LOSSES, losses))) / 4)
    return losses / (1 + losses)


def _missing(held: int, share: float) -> Iterator[tuple[int, float]]:
    """How many of so many workers may be missing at a time, and with which chance each; without those that are next to
    impossible.
    """
    mean = held * share
    around = 1 + SPREAD * math.sqrt(mean * (1 - share))
    fewest, most = max(0, math.floor(mean - around)), min(held, math.ceil(mean + around))
    for lost in range(fewest, most + 1):
        ways = math.lgamma(held + 1) - math.lgamma(lost + 1) - math.lgamma(held - lost + 1)
        chance = math.exp(ways + lost * math.log(share) + (held - lost) * math.log1p(-share))
        if chance > LEAST_CHANCE:
            yield lost, chance


# how many are worth their price


def to_have(state: CoordinatorState) -> int:
    """As many as the job asks for, and one more while that is to take the place of a slow one."""
    wanted, target = wanted_workers(state.spec), state.holding.target
    if gives_back(state.spec) and target is not None:
        wanted = min(wanted, target + state.spec.standby.workers)
    return wanted + (state.stragglers.asked_at is not None)


def fewest_to_begin(state: CoordinatorState) -> int:
    """Workers of the smallest grid that has room, as far as that is known."""
    spec = state.spec
    fewest = fewest_workers(spec)
    rates = choosing.rates_of(state) if spec.elastic else None
    if rates is not None:
        most = whole_workers(spec)
        fewest = next((n for n in range(fewest, most) if rates.best(n)), most)
    return fewest


class Worth:
    """What so many workers are expected to train, and to cost."""

    def __init__(self, state: CoordinatorState, rates: GridRates, now: float) -> None:
        self._state, self._rates = state, rates
        self._share = missing_share(state, now)
        self._speeds: dict[int, float] = {}  # of so many that are all there
        known, spec = state.holding, state.spec
        there = sorted(known.prices[w] for w in known.there if w in known.prices)
        more = known.more or ((there[len(there) // 2] if there else UNPRICED, 1),)
        self._sums = list(accumulate(there, initial=0.0))
        self._more = list(accumulate(_each(more, wanted_workers(spec)), initial=0.0))
        self.batch = spec.training.global_batch_size
        self.most, self.held = whole_workers(spec), known.target
        # what a choice depends on; times in steps, so that they do not become others all the time
        spans = (choosing.outlook(state, now), state.splits.pause or 0.0)
        steps = tuple(round(2 * math.log2(max(LEAST_SPAN, span))) for span in spans)
        self.key = (
            rates,
            tuple(choosing.known_steps(state, rates).items()),
            choosing.scale(state, rates),
            grid_of(state.current_plan),
            self._share,
            more,
            tuple(there),
            self.most,
            self.held,
            spec.standby.workers,
            steps,
        )

    def speed(self, held: int) -> float:
        """Samples a second, with as many missing at a time as losses and the time until others come let expect."""
        chances = dict(_missing(held, self._share))
        return sum(chance * self._undisturbed(held - lost) for lost, chance in chances.items()) / sum(chances.values())

    def _undisturbed(self, workers: int) -> float:
        if workers not in self._speeds:
            found = choosing.best(self._state, self._rates, workers) if workers > 0 else None
            self._speeds[workers] = self.batch / found.seconds if found else 0.0
        return self._speeds[workers]

    def price(self, held: int) -> float:
        """Money an hour, with those on standby: of the cheapest that are there, and of others that would come."""
        held += self._state.spec.standby.workers
        here = min(held, len(self._sums) - 1)
        return self._sums[here] + self._more[held - here]

    def least(self) -> float:
        """Samples a second, at least, of what is chosen."""
        return AS_FAST * self.speed(self.most)

    def suffices(self, held: int) -> bool:
        """Is what is held fast enough to stay, as estimates are off by as much?"""
        return self.speed(held) >= TOO_SLOW * self.speed(self.most)

    def value(self, held: int) -> float:
        price = self.price(held)
        return self.speed(held) / price if price else self.speed(held)


def worth_most(state: CoordinatorState, worth: Worth, rates: GridRates, now: float) -> int | None:
    """How many workers, without those on standby, train the most for their price, of all numbers that are about as
    fast as the most; the number that is held as long as no other is better by enough. None if no grid fits.
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
    """Workers that train so much."""
    fewer, enough = 0, most
    while enough - fewer > 1:
        middle = (fewer + enough) // 2
        if worth.speed(middle) >= speed:
            enough = middle
        else:
            fewer = middle
    return enough


def _compared(worth: Worth, fewest: int, most: int, top: float) -> Iterator[int]:
    """Numbers of workers from `fewest` to `most` that could be worth more than the fewest: all, or some if they are
    many.
    """
    least = worth.value(fewest)
    able = [n for n in range(fewest, most + 1) if top >= least * worth.price(n)] or [fewest]
    yield from able[:: -(-len(able) // MOST_COMPARED)]


def _pause_of(state: CoordinatorState, rates: GridRates, workers: int) -> float:
    found = choosing.best(state, rates, workers)
    changes = found is not None and found.grid != grid_of(state.current_plan)
    return choosing.pause(state, rates, found.grid) if found is not None and changes else 0.0


def resume(turn: Turn) -> None:
    """After our own restart: as many as run stages, until it is measured anew how many are worth their price."""
    known, plan = turn.state.holding, turn.state.plan
    if gives_back(turn.state.spec) and plan is not None:
        turn.put(replace(known, target=grid_of(plan).cells))


def aim(turn: Turn, rates: GridRates) -> None:
    """Hold another number of workers if that has been better for a while."""
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
        changed = replace(known, aim=None, target=number, told=_told(worth, number))
        turn.do(Emit("WorkersChosen", changed.told))
    else:
        changed = known
    turn.put(changed)


def _told(worth: Worth, number: int) -> str:
    if number == worth.most:
        return f"all of {count(worth.most, 'worker')} are worth their price"
    speed = worth.speed(number) / worth.speed(worth.most)
    price = worth.price(number) / max(1e-12, worth.price(worth.most))
    at_most = f"{number} of at most {count(worth.most, 'worker')}"
    return f"{at_most} are held: {speed:.2f} of the speed for {price:.2f} of the price"


def counted(state: CoordinatorState, workers: int) -> int:
    """The number of workers, out of so many, for whom a grid is chosen: the others are given back, or stand by."""
    target = state.holding.target
    return workers if target is None or not gives_back(state.spec) else min(workers, target)


# which go


def _order(state: CoordinatorState, worker: WorkerId, now: float) -> tuple[float, float, int, str]:
    """The last ones go first: those that cost more, then those in zones from which more are taken away."""
    known = state.holding
    price = known.prices.get(worker, known.more[0][0] if known.more else UNPRICED)
    zone = state.workers[worker].peer.zone if worker in state.workers else ""
    return price, hazard(state, zone, now), len(worker), worker


def is_too_large(state: CoordinatorState) -> bool:
    """Do some run stages who are to be given back?"""
    cells = grid_of(state.current_plan).cells
    return cells > counted(state, cells)


def kept(state: CoordinatorState, peers: list[Peer], grid: Grid, now: float) -> list[Peer]:
    """Those that stages of that grid are given to, if some are to go: who runs some now, then by price."""
    number = max(grid.cells, counted(state, len(peers)))
    if number >= len(peers) or state.plan is None:
        return peers
    runs = {state.plan.at(cell).owner for cell in state.plan.cells()}
    first = sorted(peers, key=lambda peer: (peer.worker not in runs, *_order(state, peer.worker, now)))
    chosen = {peer.worker for peer in first[:number]}
    return [peer for peer in peers if peer.worker in chosen]


def picks(state: CoordinatorState, then: Grid) -> bool:
    """Are some given back, and does it matter which ones? Then layers are split anew, whatever its stages."""
    known = state.holding
    prices = [known.prices[w] for w in known.there if w in known.prices]
    if not is_too_large(state) or then.cells >= grid_of(state.current_plan).cells or len(prices) < 2:
        return False
    return max(prices) > (1 + UNLIKE) * min(prices)


def give_back_surplus(turn: Turn) -> bool:
    """Let those go that are more than are held and run nothing. Did any?"""
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
        told = state.holding.told or f"{count(to_have(state), 'worker')} are held"
        turn.do(Emit("GivenBack", f"{worker} is given back: {told}"))
    return bool(idle)
