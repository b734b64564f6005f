"""Reports beside what torchtitan and Megatron publish: the table of docs/benchmarks.md. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bamboo.bench.bench_measurements import EAGER
from bamboo.bench.report import BenchModel, BenchPart, BenchReport
from bamboo.bench.tables import Row, peak_of, sides, used
from bamboo.profiles.devices import DeviceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRate:
    """What a maker of another system publishes. tokens: a second on each device. mfu: in per cent."""

    system: str
    model: str
    devices: str
    tokens: str
    mfu: str
    determinism: str


PUBLISHED: Final = (
    PublishedRate(
        system="torchtitan, compiled",
        model="Llama 3.1 8B",
        devices="8 x H100",
        tokens="6,667",
        mfu="33 to 39",
        determinism="–",
    ),
    PublishedRate(
        system="Megatron",
        model="large, dense and mixtures",
        devices="H100",
        tokens="–",
        mfu="47 to 48",
        determinism="4 to 17 %",
    ),
)
NOT_YET: Final = "not measured yet"
COLUMNS: Final = ("System", "Model", "Devices", "Tokens/s a device", "MFU, %", "Determinism costs")


def beside_published(reports: Sequence[BenchReport], devices: DeviceTable) -> str:
    """A Markdown table: what is published, then the fastest side of plain PyTorch and of Bamboo in each report."""
    rows: list[Row] = [(one.system, one.model, one.devices, one.tokens, one.mfu, one.determinism) for one in PUBLISHED]
    for report in reports:
        rows += _rows(report, devices, BenchPart.THROUGHPUT, report.model)
        if report.larger is not None:
            rows += _rows(report, devices, BenchPart.LARGER, report.larger)
    if not reports:
        rows += [(system, "–", "–", *3 * (NOT_YET,)) for system in ("plain PyTorch", "Bamboo")]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(report: BenchReport, devices: DeviceTable, part: BenchPart, model: BenchModel) -> list[Row]:
    results = report.of_part(part)
    found = [side for side in sides(results) if side.rounds]
    flops = next((one.flops for one in results if one.side == EAGER and one.flops), None)
    rows = list[Row]()
    for system, plain in (("plain PyTorch", True), ("Bamboo", False)):
        kind = [side for side in found if side.name.startswith(EAGER) is plain]
        if not kind:
            continue
        side = max(kind, key=lambda side: side.samples_per_second / side.rounds[0].devices)
        one = side.rounds[0]
        peak = peak_of(report, devices, one.precision)
        share = used(side, flops, peak) if flops else None
        rows.append(
            (
                f"{system} ({side.name}), {report.date}",
                f"{model.name}, {one.precision}",
                f"{one.devices} x {report.machine.devices[0].name}",
                f"{side.samples_per_second * model.tokens / one.devices:,.0f}",
                "–" if share is None else f"{100 * share:.0f}",
                "–" if plain or part is BenchPart.LARGER else _determinism(report),
            )
        )
    return rows


def _determinism(report: BenchReport) -> str:
    """How much longer a step takes with it, in the median."""
    group = sides([one for one in report.of_part(BenchPart.PRICES) if one.group == "determinism"])
    ratios = [ratio for side in group[1:] for ratio in side.ratios]
    return f"{100 * (1 / statistics.median(ratios) - 1):.1f} %" if ratios else "–"
