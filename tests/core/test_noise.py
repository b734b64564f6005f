"""Noisy measurements: their statistics, and the grids that the real coordinator chooses from them."""

import random

import msgspec
import pytest

from bamboo_core.control import protocol
from bamboo_core.coordinator.grids import noise
from bamboo_core.planning.plan import Plan
from bamboo_core.planning.profile import Layer, LayerBytes, ModelFigures, Network
from bamboo_core.planning.splits.resplit_plans import Grid, grid_of
from bamboo_core.planning.splits.speeds import StageTimes
from bamboo_core.planning.steps.grid_rates import GridRates
from job_simulation_kit import HOUR
from slow_world import BACKWARD, FORWARD, Slowed


def looks(*works: float) -> noise.Looks:
    return tuple((work, 2 * work) for work in works)


def test_layers_have_changed_if_all_newer_looks_say_so() -> None:
    half = noise.KEPT // 2
    assert not noise.have_changed(looks(*[1.0] * half, *[1.2] * (half - 1))), "too few"
    assert noise.have_changed(looks(*[1.0] * half, *[1.2] * half))
    assert noise.have_changed(looks(*[1.0, 0.9] * (half // 2), *[0.7, 0.5] * (half // 2)))
    assert not noise.have_changed(looks(*[1.0] * half, *[1.04] * half)), "by too little"
    assert not noise.have_changed(looks(*[1.0] * half, *[1.5] * (half - 1), 1.0)), "one is as before"


def test_noise_alone_says_nothing() -> None:
    rng = random.Random(1)
    works = [rng.uniform(0.5, 1.5) for _ in range(20_000)]
    found = [noise.have_changed(looks(*works[n : n + noise.KEPT])) for n in range(len(works) - noise.KEPT)]
    assert not any(found)
    assert noise.usual(looks(1.0, 9.0, 2.0)) == (2.0, 4.0)


def test_more_steps_leave_less_doubt() -> None:
    assert noise.doubt([1.0]) == noise.doubt([1.0] * 5) == 0.0
    few, many = noise.doubt([0.5, 1.0, 1.5]), noise.doubt([0.5, 1.0, 1.5] * 7)
    assert 0.2 < many < few


def test_what_is_old_counts_less_and_then_not_at_all() -> None:
    weights = [noise.weight(noise.HALF_LIFE * age) for age in (0.0, 0.9, 1.0, 2.5, 3.0, 9.0)]
    assert weights == [1.0, 1.0, 0.5, 0.25, 0.125, 0.0]


def test_the_third_change_and_later_ones_wait_ever_longer() -> None:
    assert [noise.rest(changes) / HOUR for changes in range(5)] == [0.0, 0.0, 1.0, 2.0, 4.0]


class Noisy(Slowed):
    """A job whose reported times of steps and stages deviate from the model at random, by up to the share `off`."""

    def __init__(self, workers: int, layers: list[float], size: int, flow: float, off: float) -> None:
        self.rng = random.Random(repr(layers))
        self.off = off
        held = LayerBytes(parameters=size, optimizer=size, gradients=size, activations=size, boundary=size // 10)
        told = protocol.Profile(costs=(1e12,) * len(layers), layers=(held,) * len(layers), memory=1 << 50)
        super().__init__(workers, 1, 0, chooses=("stages", "pipelines"), profile=told)
        self.work = dict(enumerate(layers))
        sizes = {name: getattr(held, name) for name in held.__struct_fields__}
        real = tuple(Layer(forward=FORWARD * work, backward=BACKWARD * work, **sizes) for work in layers)
        network = Network(flow=flow, machine=flow, latency=1e-3)
        self.rates = GridRates(ModelFigures(layers=real, network=network), self.spec)
        self.grids: list[tuple[float, Grid]] = []

    def check_calm(self) -> None:
        """Skip the inherited check: in these jobs, the mere passing of time may bring a decision."""

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if not self.grids or self.grids[-1][1] != grid_of(plan):
            self.grids.append((self.now, grid_of(plan)))

    def wrong(self, seconds: float) -> float:
        return seconds * self.rng.uniform(1 - self.off, 1 + self.off)

    def step_seconds(self) -> float:
        return self.wrong(self.rates.seconds_of(self.plan, self.plan.target))

    def times(self) -> dict[str, tuple[StageTimes, ...]]:
        return {worker: tuple(map(self._wrong_times, times)) for worker, times in super().times().items()}

    def _wrong_times(self, one: StageTimes) -> StageTimes:
        return msgspec.structs.replace(one, forward=self.wrong(one.forward), backward=self.wrong(one.backward))

    def run(self, seconds: float) -> None:
        while self.now < seconds:
            self.train(1)


MODELS = [
    ("computing", 6, 1_000, 1e9),
    pytest.param("equal links", 6, 10**8, 1e8, marks=pytest.mark.slow),
    ("slow links", 8, 10**9, 1e8),
    pytest.param("nine workers", 9, 10**6, 1e9, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "workers", "size", "flow"), MODELS)
def test_on_constant_nodes_the_grid_changes_at_most_twice_an_hour(
    name: str, workers: int, size: int, flow: float
) -> None:
    rng = random.Random(name)
    world = Noisy(workers, [rng.uniform(4, 20) for _ in range(12)], size, flow, 0.5)
    world.run(HOUR)
    changes = [at for at, _ in world.grids[1:]]
    assert len(changes) <= 2
    best = world.rates.best(workers)
    assert best is not None
    assert world.rates.seconds(grid_of(world.plan)) < 1.15 * best.seconds
