"""The report of `bamboo bench`: one JSON file, which is also how far a run of it is. Times are seconds, sizes bytes.

`bamboo plan --profile` and `bamboo simulate --profile` read the measured profile in it.
"""

from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec

from bamboo.profiles.files import BENCH_FORMAT
from bamboo.profiles.versioned_json import decode_versioned
from bamboo_core.planning.profile import ModelProfile

VERSION: Final = 1
MOST_RESULTS: Final = 10_000


class BenchPart(StrEnum):
    """The parts of a run, in the order in which they are measured."""

    MACHINE = "machine"
    CHECKS = "checks"
    THROUGHPUT = "throughput"
    LARGER = "larger"
    TRACE = "trace"
    PRICES = "prices"
    KILLS = "kills"
    MEMORY = "memory"
    PROFILE = "profile"


class BenchError(ValueError):
    """The report cannot be used, or the machine cannot be measured; one sentence."""


class _ReportPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base of a report's parts."""


class DeviceFound(_ReportPart, frozen=True, kw_only=True):
    """A device: a GPU, or the processor where there is none."""

    name: str
    memory: int


class LinkFound(_ReportPart, frozen=True, kw_only=True):
    """How fast copies go from one memory to another."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    rate: float  # bytes a second


class MachineFound(_ReportPart, frozen=True, kw_only=True):
    """The machine: see `bamboo_trainer.machine_facts.machine_facts`, which finds it out."""

    devices: Annotated[tuple[DeviceFound, ...], msgspec.Meta(min_length=1)]
    is_gpu: bool
    platform: dict[str, str]
    cpus: int
    memory: int
    compiler: str
    products: dict[str, float]
    links: tuple[LinkFound, ...]
    loopback: float
    same_bits: dict[str, bool]


class KillFound(_ReportPart, frozen=True, kw_only=True):
    """A worker that was killed without notice, and what came of it.

    moment: when in the step, as a share of a calm one. pause: until the lost work was repeated. affected: seconds of
    the step in which it came. calm: seconds of a calm step before it, the median.
    """

    stage: int
    step: int
    moment: float
    pause: float
    affected: float
    calm: float


class MemoryFound(_ReportPart, frozen=True, kw_only=True):
    """Bytes of the worker that needs most.

    estimated: as `bamboo validate --load` says. accounted: as the worker itself counted. measured: what the device had
    in use at most beyond what it had before, of all workers on it, `sharing` of them; without a GPU the memory that a
    worker's process shares with no other.
    """

    estimated: int
    accounted: int
    measured: int
    sharing: int


class DeviceTime(_ReportPart, frozen=True, kw_only=True):
    """What a device did in a step of so many seconds, as shares of them; kernels and copies may run at once.

    computing: kernels ran. to_device, to_host, between: copies from and to the host's memory, and to another device.
    copying_alone: copies ran, and no kernel. idle: neither.
    """

    device: str
    seconds: float
    computing: float
    to_device: float
    to_host: float
    between: float
    copying_alone: float
    idle: float


class ThreadTime(_ReportPart, frozen=True, kw_only=True):
    """Shares of a step in which a worker's thread waited. waits: with nothing to do. driver: for a device."""

    worker: str
    seconds: float
    waits: float
    driver: float


class Measured(_ReportPart, frozen=True, kw_only=True):
    """What a measurement came to; which fields are filled depends on what was run.

    key: its name in a run, by which it is found again. side: what differs from others of its group, which are compared
    with the group's first side. problem: why there is no result, a sentence.
    """

    key: str
    part: BenchPart
    group: str = ""
    side: str = ""
    round: int = 0
    took: float = 0.0
    problem: str = ""
    steps: tuple[float, ...] = ()  # seconds of each measured step
    samples: int = 0  # of a step
    devices: int = 1  # that computed
    precision: str = ""
    losses: tuple[float, ...] = ()
    flops: float | None = None  # of a sample
    bits_equal: bool | None = None  # to those of another grid without losses
    kills: tuple[KillFound, ...] = ()
    shares: dict[str, float] = {}  # of the workers' time, by kind
    device_times: tuple[DeviceTime, ...] = ()  # of one step
    thread_times: tuple[ThreadTime, ...] = ()
    memory: MemoryFound | None = None


class BenchModel(_ReportPart, frozen=True, kw_only=True):
    """The job that is measured. samples: of a microbatch; microbatches: of a step; precision: of the products."""

    name: str
    entrypoint: str
    config: dict[str, Any]
    samples: int
    microbatches: int
    precision: str
    tokens: int  # of a sample


class BenchReport(_ReportPart, frozen=True, kw_only=True):
    """A run, or as much of it as is done. parts: those that are wanted. rounds: how often the sides take turns. larger:
    the model of that part, if there is room for one.
    """

    format: str = BENCH_FORMAT
    version: int = VERSION
    date: str
    bamboo: str  # its version
    quick: bool
    rounds: int
    parts: tuple[BenchPart, ...]
    machine: MachineFound
    model: BenchModel
    larger: BenchModel | None = None
    complete: bool = False
    results: Annotated[tuple[Measured, ...], msgspec.Meta(max_length=MOST_RESULTS)] = ()
    profile: ModelProfile | None = None

    def of_part(self, part: BenchPart) -> list[Measured]:
        return [one for one in self.results if one.part is part]


_DECODER = msgspec.json.Decoder(BenchReport, strict=True)


def parse_report(path: str, text: bytes | str) -> BenchReport:
    """The report in a text. path: for messages. Raises BenchError naming it, and what was expected where."""
    expected = BENCH_FORMAT, VERSION
    return decode_versioned(_DECODER, path, text, what="report of bamboo bench", expected=expected, error=BenchError)


def report_to_json(report: BenchReport) -> bytes:
    """The file's content."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
