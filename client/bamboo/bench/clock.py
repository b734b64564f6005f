"""How a run of `bamboo bench` is divided by the clock: each part has a share of the hour, at most ten minutes. Pure.

What a measurement will take is a guess, made before anything is known but how fast products are: it decides what is
begun with little time left. How long it may take is decided by the clock.
"""

from dataclasses import dataclass
from typing import Final

from bamboo.bench.report import BenchPart, MachineFound
from bamboo.bench.sizes import BenchSizes, MeasuredModel

ALL_SECONDS: Final = 3600.0
PART_SECONDS: Final = {
    BenchPart.MACHINE: 120.0,
    BenchPart.CHECKS: 600.0,
    BenchPart.THROUGHPUT: 600.0,
    BenchPart.LARGER: 540.0,
    BenchPart.TRACE: 150.0,
    BenchPart.PRICES: 540.0,
    BenchPart.KILLS: 540.0,
    BenchPart.MEMORY: 240.0,
    BenchPart.PROFILE: 240.0,
}
LEAST_SECONDS: Final = 20.0  # with less left nothing is begun
HANGS: Final = 4  # times what was expected: then it is given up, so that the others of its part have their turn

START: Final = {True: 25.0, False: 8.0}  # of a job's workers or of a process, on GPUs and on processors
EACH_BILLION: Final = 12.0  # of a worker's parameters, which are made on one thread
COMPILING: Final = 60.0
USED: Final = 0.35  # of what products reach, by a model
OPERATIONS: Final = 6.0  # of a token, for each parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a measurement runs. devices: that compute. stages: of a pipeline, on a device each. processes: among which
    the model is divided. runs: jobs, one after the other; tiny: with a model that takes no time. around: seconds beside
    them.
    """

    devices: int = 1
    stages: int = 1
    processes: int = 1
    precision: str
    compiled: bool = False
    runs: int = 1
    tiny: bool = False
    around: float = 0.0


def expected_seconds(what: Expected, of: MeasuredModel, machine: MachineFound, sizes: BenchSizes) -> float:
    model, parameters = of.model, of.size.parameters
    start = START[machine.is_gpu] + what.compiled * COMPILING
    if what.tiny:
        return what.runs * start + what.around
    start += EACH_BILLION * parameters / 1e9 / what.processes
    operations = OPERATIONS * parameters * model.tokens * model.samples * model.microbatches
    rate = machine.products.get(what.precision, min(machine.products.values()))
    step = operations / (USED * rate * what.devices) * (model.microbatches + what.stages - 1) / model.microbatches
    measured = min(sizes.most, max(sizes.least, sizes.seconds / step))
    return what.runs * (start + (sizes.warmup + measured) * step) + what.around


def seconds_for(part: BenchPart, expected: float, part_left: float, all_left: float) -> float | None:
    """How long a measurement may take; None if it is not begun. part_left, all_left: seconds of the part and of all.

    What is expected to take longer than its whole part is begun as long as half of that is left.
    """
    left, half = min(part_left, all_left), PART_SECONDS[part] / 2
    if left < max(LEAST_SECONDS, min(expected, half)):
        return None
    return min(left, max(half, HANGS * expected))
