"""What a report says, as tables: the terminal, the page and docs/benchmarks.md show the same ones. Pure."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bamboo.bench.bench_measurements import EAGER
from bamboo.bench.report import BenchModel, BenchPart, BenchReport, KillFound, Measured
from bamboo.profiles.devices import DeviceTable
from bamboo_core.text import count, size

TOLERANCE: Final = 1e-3  # of losses that are computed in another order, relative
Row = tuple[str, ...]
NONE: Final = "–"
COPIES: Final = ("sync_commit", "reduction", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable:
    """note: what to know to read it. bars: for each row the length of a bar, from 0 to 1, on the page; or none."""

    title: str
    note: str
    columns: Row
    rows: tuple[Row, ...]
    bars: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What the rounds of a side came to. ratios: samples a second over those of the group's first side that came to
    something, round by round. problem: why there is nothing.
    """

    name: str
    rounds: tuple[Measured, ...]
    ratios: tuple[float, ...]
    problem: str = ""

    @property
    def samples_per_second(self) -> float:
        return statistics.median(rate(one) for one in self.rounds)


def rate(one: Measured) -> float:
    """Samples a second over all measured steps: on a busy machine two commits may be heard of at once."""
    return one.samples / statistics.fmean(one.steps)


def sides(results: Sequence[Measured]) -> list[Side]:
    """The sides of a group, in the order of the first round."""
    by_side: dict[str, list[Measured]] = defaultdict(list)
    for one in sorted(results, key=lambda one: one.round):
        by_side[one.side].append(one)
    first = next((ones for ones in by_side.values() if any(one.steps for one in ones)), [])
    base = {one.round: rate(one) for one in first if one.steps}
    found = []
    for name, rounds in by_side.items():
        done = tuple(one for one in rounds if one.steps)
        ratios = tuple(rate(one) / base[one.round] for one in done if one.round in base)
        problem = "" if done else rounds[0].problem
        found.append(Side(name=name, rounds=done, ratios=ratios, problem=problem))
    return found


def compared_with(found: Sequence[Side]) -> str:
    """The side of a group that the others are compared with."""
    return next((side.name for side in found if side.rounds), NONE)


def peak_of(report: BenchReport, devices: DeviceTable, precision: str) -> float | None:
    """Operations a second that the maker says of one device, for that precision; None if the table has not this one."""
    words = re.findall(r"[a-z0-9]+", report.machine.devices[0].name.lower())
    for name, device in devices.devices.items():
        if report.machine.is_gpu and name in words and precision in device.products:
            return device.products[precision].peak
    return None


def used(side: Side, flops: float, each: float | None) -> float | None:
    """The share of the operations that the devices could have done which the model's own were. flops: of a sample.
    each: of a device, a second.
    """
    return None if each is None else side.samples_per_second * flops / (each * side.rounds[0].devices)


def tables(report: BenchReport, devices: DeviceTable) -> list[BenchTable]:
    """All that is known so far. devices: what their makers say."""
    made = {
        BenchPart.MACHINE: lambda: _machine(report),
        BenchPart.CHECKS: lambda: _checks(report),
        BenchPart.THROUGHPUT: lambda: _throughput(report, devices, BenchPart.THROUGHPUT, report.model),
        BenchPart.LARGER: lambda: _throughput(report, devices, BenchPart.LARGER, report.larger or report.model),
        BenchPart.TRACE: lambda: _trace(report),
        BenchPart.PRICES: lambda: _prices(report),
        BenchPart.KILLS: lambda: _kills(report),
        BenchPart.MEMORY: lambda: _memory(report),
        BenchPart.PROFILE: lambda: _profile(report),
    }
    return [table for part in BenchPart if part in report.parts for table in made[part]()]


def _machine(report: BenchReport) -> Iterator[BenchTable]:
    machine = report.machine
    each = ", ".join(f"{text} {value}" for text, value in machine.platform.items() if value)
    rows = [
        ("devices", f"{len(machine.devices)} x {machine.devices[0].name}, {size(machine.devices[0].memory)} each"),
        ("host", f"{count(machine.cpus, 'processor')}, {size(machine.memory)}"),
        ("software", each),
        ("compiled layers", f"no: {machine.compiler} lacks" if machine.compiler else "yes"),
        *((f"products, {name}", f"{value / 1e12:.3g} TFLOP/s") for name, value in machine.products.items()),
        *((f"copies, {link.source} to {link.target}", f"{link.rate / 1e9:.3g} GB/s") for link in machine.links),
        ("one connection within the machine", f"{machine.loopback / 1e9:.3g} GB/s"),
        *((f"same bits twice, {name}", "yes" if same else "NO") for name, same in machine.same_bits.items()),
    ]
    yield BenchTable(title="The machine", note="", columns=("", "found"), rows=tuple(rows))


def _checks(report: BenchReport) -> Iterator[BenchTable]:
    if not (results := report.of_part(BenchPart.CHECKS)):
        return
    plain, *others = results
    rows = list[Row]()
    for one in others:
        words = {True: "equal", False: "DIFFERENT", None: one.problem or NONE}[one.bits_equal]
        far = loss_difference(one, plain) if one.precision == "fp32" else None
        close = NONE if far is None else f"{far:.1e}" + ("" if far <= TOLERANCE else ", TOO FAR")
        rows.append((one.side, words, close))
    note = (
        "A tiny Llama on these devices, two workers killed, with compiled layers one. Bits: of the final weights,"
        " against the same job undisturbed on another grid. Losses: the largest relative difference from one plain"
        " PyTorch process."
    )
    yield BenchTable(title="Self-checks", note=note, columns=("", "bits", "losses"), rows=tuple(rows))


def losses_differ(report: BenchReport) -> bool:
    """Has a job in fp32 come to other losses than the plain process?"""
    plain, *others = report.of_part(BenchPart.CHECKS) or (None,)
    found = [loss_difference(one, plain) for one in others if plain and one.precision == "fp32"]
    return any(far is not None and far > TOLERANCE for far in found)


def loss_difference(one: Measured, other: Measured) -> float | None:
    """The largest relative difference of a step's loss; None if nothing can be compared."""
    pairs = list(zip(one.losses, other.losses, strict=False))
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def _throughput(report: BenchReport, devices: DeviceTable, part: BenchPart, model: BenchModel) -> Iterator[BenchTable]:
    if not (results := report.of_part(part)):
        return
    title = "Throughput" if part is BenchPart.THROUGHPUT else "Throughput of a larger model"
    if part is BenchPart.LARGER and report.larger is None:
        rows_of_none = tuple((one.side, one.problem) for one in results)
        yield BenchTable(title=title, note="", columns=("", ""), rows=rows_of_none)
        return
    flops = next((one.flops for one in results if one.side == EAGER and one.flops), None)
    found, rows, bars = sides(results), list[Row](), list[float | None]()
    most = max((side.samples_per_second for side in found if side.rounds), default=1.0)
    for side in found:
        if not side.rounds:
            rows.append((side.name, NONE, side.problem, NONE, NONE, NONE))
            bars.append(None)
            continue
        one = side.rounds[0]
        published = peak_of(report, devices, one.precision)
        here = report.machine.products.get(one.precision)
        shares = [used(side, flops, of) if flops else None for of in (published, here)]
        rows.append(
            (
                side.name,
                f"{side.samples_per_second:.4g}",
                spread(side.ratios),
                str(one.devices),
                *(NONE if share is None else f"{100 * share:.3g} %" for share in shares),
            )
        )
        bars.append(side.samples_per_second / most)
    note = (
        f"{model.name}, {model.precision}, {model.microbatches} microbatches of {model.samples} samples of"
        f" {model.tokens} tokens. Ratio: over {compared_with(found)}, round by round, median (least to most). MFU: the"
        " model's operations, of the device's published peak; of products: of what a product of matrices reaches here."
    )
    columns = ("", "samples/s", "ratio", "devices", "MFU", "of products")
    yield BenchTable(title=title, note=note, columns=columns, rows=tuple(rows), bars=tuple(bars))


def spread(values: Sequence[float]) -> str:
    """The median, the least and the most."""
    if not values:
        return NONE
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _trace(report: BenchReport) -> Iterator[BenchTable]:
    if not (results := report.of_part(BenchPart.TRACE)):
        return
    yield _devices(report, results)
    rows = list[Row]()
    for one in results:
        if one.problem:
            rows.append((one.side, one.problem, NONE, NONE, NONE))
            continue
        waits, copies = one.shares["idle"], sum(one.shares[kind] for kind in COPIES)
        driver = [each.driver for each in one.thread_times]
        shares = (max(0.0, 1 - waits - copies), waits, copies)
        rows.append((one.side, *map(_percent, shares), _percent(statistics.fmean(driver)) if driver else NONE))
    note = (
        "Shares of the time of the threads that give devices their work, in the product's own trace of all steps."
        " Copies: exchange and commit of gradients, frames, and the engine itself. Of waits the pipeline's own bubble"
        " is a part. For a device: in the driver's calls that wait, of one step."
    )
    columns = ("redundancy", "computing", "waits", "copies and the engine", "for a device")
    yield BenchTable(title="What the workers' threads did", note=note, columns=columns, rows=tuple(rows))


def _devices(report: BenchReport, results: Sequence[Measured]) -> BenchTable:
    rows = list[Row]()
    for one in results:
        for device in one.device_times:
            copies = (device.to_device, device.to_host, device.between, device.copying_alone)
            shares = (device.computing, *copies, device.idle)
            rows.append((f"{one.side}, {device.device}", f"{1000 * device.seconds:.4g}", *map(_percent, shares)))
        if not one.device_times:
            rows.append((one.side, one.problem or "torch.profiler saw nothing of them", *6 * (NONE,)))
    note = (
        "One step as torch.profiler recorded it; what several streams or workers do at once counts once. Copies and"
        " computing overlap: computing, copies alone (no kernel ran) and idle are all of the time."
    )
    if not report.machine.is_gpu:
        note += " Computing, here: torch's operations."
    columns = ("", "step, ms", "computing", "from host", "to host", "between devices", "copies alone", "idle")
    return BenchTable(title="What the devices did", note=note, columns=columns, rows=tuple(rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _prices(report: BenchReport) -> Iterator[BenchTable]:
    results = report.of_part(BenchPart.PRICES)
    for group in dict.fromkeys(one.group for one in results):
        found = sides([one for one in results if one.group == group])
        rows = list[Row]()
        for side in found:
            costs = [100 * (1 / ratio - 1) for ratio in side.ratios]
            told = (
                f"{statistics.median(costs):+.1f} ({min(costs):+.1f} to {max(costs):+.1f})" if costs else side.problem
            )
            step = 1000 * statistics.fmean(s for one in side.rounds for s in one.steps) if side.rounds else None
            rows.append((side.name, NONE if step is None else f"{step:.4g}", told))
        note = f"How much longer a step takes than with {compared_with(found)}, round by round: median (least to most)."
        columns = ("", "step, ms", "longer, %")
        yield BenchTable(title=f"The price of {group}", note=note, columns=columns, rows=tuple(rows))


def _kills(report: BenchReport) -> Iterator[BenchTable]:
    for one in report.of_part(BenchPart.KILLS):
        rows: list[Row] = [_kill(kill) for kill in one.kills]
        if one.kills:
            pauses = [1000 * kill.pause for kill in one.kills]
            ratios = [kill.affected / kill.calm for kill in one.kills]
            rows.append(("median", NONE, NONE, f"{statistics.median(pauses):.0f}", f"{statistics.median(ratios):.2f}"))
        words = {True: "equal to", False: "DIFFERENT from", None: "not compared with"}[one.bits_equal]
        note = one.problem or (
            f"{one.side}; {count(len(one.kills), 'worker')} killed without notice at chosen moments of a step. The"
            f" final bits are {words} those of the same job undisturbed on another grid."
        )
        columns = ("stage", "moment", "calm step, ms", "pause, ms", "affected step / calm")
        yield BenchTable(title="Losses of workers", note=note, columns=columns, rows=tuple(rows))


def _kill(kill: KillFound) -> Row:
    return (
        str(kill.stage),
        f"{100 * kill.moment:.0f} % of step {kill.step + 1}",
        f"{1000 * kill.calm:.4g}",
        f"{1000 * kill.pause:.0f}",
        f"{kill.affected / kill.calm:.2f}",
    )


def _memory(report: BenchReport) -> Iterator[BenchTable]:
    rows = list[Row]()
    for one in report.of_part(BenchPart.MEMORY):
        if (found := one.memory) is None:
            rows.append((one.side, one.problem, NONE, NONE, NONE))
            continue
        sizes = (size(number) for number in (found.estimated, found.accounted, found.measured))
        rows.append((one.side, *sizes, str(found.sharing)))
    note = (
        "Estimated: by `bamboo validate --load`, of the worker that needs most. Accounted: as that worker counts."
        " Measured: what a device has in use at most beyond what it had before, of all workers that share it, with"
        " torch itself; without a GPU what a worker's process has for itself."
    )
    columns = ("redundancy", "estimated", "accounted", "measured", "workers a device")
    yield BenchTable(title="Memory", note=note, columns=columns, rows=tuple(rows))


def _profile(report: BenchReport) -> Iterator[BenchTable]:
    if (profile := report.profile) is None:
        rows = [(one.side, one.problem) for one in report.of_part(BenchPart.PROFILE)]
        yield BenchTable(title="The measured profile", note="", columns=("", ""), rows=tuple(rows))
        return
    forward, backward = (1000 * sum(getattr(one, kind) for one in profile.layers) for kind in ("forward", "backward"))
    rows = [
        ("layers", str(len(profile.layers))),
        (f"a microbatch of {profile.samples}", f"forward {forward:.4g} ms, backward {backward:.4g} ms"),
        ("estimated", ", ".join(profile.estimated) or "nothing"),
    ]
    note = "`bamboo plan --profile report.json` and `bamboo simulate --profile report.json` read it."
    yield BenchTable(title="The measured profile", note=note, columns=("", "found"), rows=tuple(rows))
