"""A run of `bamboo bench`: measures what is not measured yet, and keeps the report after each measurement."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from bamboo import stop_signals
from bamboo.bench.bench_measurements import PlannedMeasurement, list_measurements
from bamboo.bench.bench_page import bench_page
from bamboo.bench.clock import ALL_SECONDS, LEAST_SECONDS, PART_SECONDS, seconds_for
from bamboo.bench.execution import find_machine, measure
from bamboo.bench.report import BenchError, BenchModel, BenchPart, BenchReport, Measured, parse_report, report_to_json
from bamboo.bench.sizes import BenchSizes, choose_sizes
from bamboo.bench.tables import tables
from bamboo.profiles.files import read_devices
from bamboo_core.complaints import system_reason

REPORT: Final = "report.json"
PAGE: Final = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """output: the folder of the report and the page. parts: those that are measured. rounds: of sides that are
    compared. quick: with tiny sizes.
    """

    output: Path
    parts: tuple[BenchPart, ...]
    rounds: int
    quick: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchProgress:
    """What runs now. left: seconds that the rest may take, a guess."""

    number: int
    of: int
    what: str
    left: float


def run_bench(options: BenchOptions, tell: Callable[[BenchProgress], None]) -> BenchReport:
    """Measures what the report in the output does not have yet. Raises BenchError, BenchInterrupted and OSError."""
    with _alone(options.output):
        return _run(options, tell)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The time in which this process alone writes there. Raises BenchError and OSError."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BenchError(f"another bamboo bench writes to {folder}; expected its end, or a new folder") from None
    else:
        yield
    finally:
        os.close(lock)


def _run(options: BenchOptions, tell: Callable[[BenchProgress], None]) -> BenchReport:
    began = time.monotonic()
    kept = _kept(options)
    report = kept or _begun(options)
    sizes = choose_sizes(report.machine, quick=options.quick)
    if isinstance(sizes, str):
        raise BenchError(f"nothing can be measured on this machine: {sizes}")
    if (report.model, report.larger) != models_of(sizes):
        raise BenchError(f"{options.output / REPORT} is of a model that is measured no more; expected a new folder")
    parts = tuple(part for part in BenchPart if part in (*options.parts, *(report.parts if kept else ())))
    listed = list_measurements(report.machine, sizes, parts, rounds=options.rounds, quick=options.quick)
    results = still_known(report, listed, options.parts)
    report = msgspec.structs.replace(report, results=_ordered(listed, results), parts=parts, complete=False)
    write_report(options.output, report)
    done = {result.key for result in results}
    wanted = [one for one in listed if one.part in options.parts]
    waiting = [one for one in wanted if one.key not in done]
    report = _measure_all(report, listed, wanted, waiting, sizes, options, tell, began)
    complete = {one.key for one in report.results} == {one.key for one in listed}
    report = msgspec.structs.replace(report, complete=complete)
    write_report(options.output, report)
    return report


def still_known(
    report: BenchReport, listed: Sequence[PlannedMeasurement], parts: Collection[BenchPart]
) -> list[Measured]:
    """What need not be measured again. parts: those that are measured now; of others all stays as it is."""
    known = {one.key: one for one in report.results if one.part not in parts or not one.problem}
    kept_profile = report.profile is not None
    return [known[one.key] for one in listed if one.key in known and _is_done(one, kept_profile)]


def _is_done(one: PlannedMeasurement, kept_profile: bool) -> bool:
    return kept_profile or one.part is not BenchPart.PROFILE


def _measure_all(
    report: BenchReport,
    listed: Sequence[PlannedMeasurement],
    wanted: Sequence[PlannedMeasurement],
    waiting: Sequence[PlannedMeasurement],
    sizes: BenchSizes,
    options: BenchOptions,
    tell: Callable[[BenchProgress], None],
    begun: float,
) -> BenchReport:
    """The report with what was waiting of what is wanted now. What no time is left for has that as its problem. begun:
    when the run was, with the look at the machine, seconds.
    """
    part_began, part = 0.0, None
    for number, one in enumerate(waiting):
        now = time.monotonic()
        if one.part is not part:
            part, part_began = one.part, now
        part_left, all_left = PART_SECONDS[one.part] - (now - part_began), ALL_SECONDS - (now - begun)
        seconds = seconds_for(one.part, one.expected, part_left, all_left)
        place = len(wanted) - len(waiting) + number + 1
        tell(BenchProgress(number=place, of=len(wanted), what=_named(one), left=expected_of(waiting[number:])))
        if seconds is None and not one.lacks:
            found = _without_time(one)
        else:
            found, profile = measure(one, report.machine, sizes, seconds or LEAST_SECONDS)
            report = msgspec.structs.replace(report, profile=profile or report.profile)
        report = msgspec.structs.replace(report, results=_ordered(listed, [*report.results, found]))
        write_report(options.output, report)
    return report


def expected_of(waiting: Sequence[PlannedMeasurement]) -> float:
    """The seconds that these may take, no part more than it may."""
    by_part = {one.part: 0.0 for one in waiting}
    for one in waiting:
        by_part[one.part] += 0.0 if one.lacks else one.expected
    return sum(min(seconds, PART_SECONDS[part]) for part, seconds in by_part.items())


def _without_time(one: PlannedMeasurement) -> Measured:
    minutes = f"{PART_SECONDS[one.part] / 60:.0f} minutes or the run's {ALL_SECONDS / 60:.0f}"
    text = f"about {one.expected:.0f} s were not left of the part's {minutes}"
    return Measured(
        key=one.key,
        part=one.part,
        group=one.group,
        side=one.side,
        round=one.round,
        problem=f"{text}; the same command goes on",
    )


def _named(one: PlannedMeasurement) -> str:
    return ", ".join(filter(None, (f"{one.part}: {one.side}", f"round {one.round + 1}" if one.round else "")))


def _ordered(wanted: Sequence[PlannedMeasurement], results: Sequence[Measured]) -> tuple[Measured, ...]:
    """The results in the order in which they are listed."""
    found = {one.key: one for one in results}
    return tuple(found[one.key] for one in wanted if one.key in found)


def _begun(options: BenchOptions) -> BenchReport:
    machine = find_machine(quick=options.quick)
    sizes = choose_sizes(machine, quick=options.quick)
    if isinstance(sizes, str):
        raise BenchError(f"nothing can be measured on this machine: {sizes}")
    model, larger = models_of(sizes)
    return BenchReport(
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        bamboo=version("bamboo-spot"),
        quick=options.quick,
        rounds=options.rounds,
        parts=options.parts,
        machine=machine,
        model=model,
        larger=larger,
    )


def models_of(sizes: BenchSizes) -> tuple[BenchModel, BenchModel | None]:
    """The usual model, and the larger one if there is one."""
    return sizes.usual.model, None if sizes.larger is None else sizes.larger.model


def _kept(options: BenchOptions) -> BenchReport | None:
    """The report that is in the output, if there is one. Raises BenchError if it is of another run."""
    path = options.output / REPORT
    try:
        report = parse_report(str(path), path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BenchError(f"cannot read {path}: {system_reason(error)}") from None
    here, there = (options.quick, options.rounds), (report.quick, report.rounds)
    if here != there:
        raise BenchError(
            f"{path} was made with other values of --quick or --rounds; expected the same, or a new folder"
        )
    devices = tuple(one.name for one in find_machine(quick=True).devices)
    if devices != tuple(one.name for one in report.machine.devices):
        raise BenchError(f"{path} was made on a machine with other devices; expected a new folder")
    return report


def write_report(folder: Path, report: BenchReport) -> None:
    """Writes the report and its page; a signal waits until both are whole. Raises OSError."""
    page = bench_page(report, tables(report, read_devices()))
    with stop_signals.held():
        for name, content in ((REPORT, report_to_json(report)), (PAGE, page.encode())):
            part = folder / f"{name}.part"
            try:
                part.write_bytes(content)
                os.replace(part, folder / name)
            except OSError:
                part.unlink(missing_ok=True)  # the disk may be full, and what was there stays whole
                raise
