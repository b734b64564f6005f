"""The page of a report: one HTML file that needs nothing else, light and dark, on any width. Pure."""

from collections.abc import Sequence
from html import escape
from typing import Final

from bamboo.bench.report import BenchReport
from bamboo.bench.tables import BenchTable

STYLE: Final = """
:root { color-scheme: light dark; --ground: #f3f5f1; --card: #fff; --ink: #18201b; --soft: #535e56; --line: #d8ded7;
  --green: #166b3a; --bar: #2f9e6233; --red: #b0261f; --amber: #85540a;
  font: 16px/1.45 system-ui, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
@media (prefers-color-scheme: dark) { :root { --ground: #0e1310; --card: #171e1a; --ink: #e9efea; --soft: #a6b2aa;
  --line: #303a33; --green: #74d99b; --bar: #5fd08f33; --red: #ff9a8f; --amber: #f2c163; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(.75rem, 3vw, 2rem) 3rem; max-width: 68rem; background: var(--ground);
  color: var(--ink); }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 0 0 .25rem; font-size: 1.15rem; }
p { margin: .25rem 0; color: var(--soft); max-width: 60rem; overflow-wrap: anywhere; }
section { margin-top: 1rem; padding: 1rem clamp(.75rem, 2.5vw, 1.25rem); background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; }
.wide { overflow-x: auto; }
table { width: 100%; margin-top: .5rem; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-top: 1px solid var(--line); text-align: right; vertical-align: top; }
th { border-top: 0; color: var(--soft); font-weight: 600; font-size: .85rem; }
th:first-child, td:first-child { padding-left: .25rem; text-align: left; min-width: 9rem; }
.facts td, .facts th { text-align: left; }
.bar { background: linear-gradient(var(--bar), var(--bar)) no-repeat left / var(--part) 100%; }
@media (max-width: 40rem) {
  thead { display: none; }
  tr { display: block; padding: .4rem 0; border-top: 1px solid var(--line); }
  td, .facts td { display: flex; gap: 1rem; justify-content: space-between; padding: .15rem .25rem; border: 0; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; }
  td:first-child { font-weight: 600; } td:first-child::before { content: none; }
}
.bad { color: var(--red); font-weight: 600; }
.good { color: var(--green); }
.state { color: var(--amber); font-weight: 600; }
"""
BAD: Final = ("NO", "DIFFERENT", "TOO FAR")
GOOD: Final = ("equal", "yes")


def bench_page(report: BenchReport, tables: Sequence[BenchTable]) -> str:
    """The page's HTML."""
    machine = report.machine
    devices = f"{len(machine.devices)} x {machine.devices[0].name}"
    facts = [devices, f"torch {machine.platform.get('torch', '?')}", report.date, f"Bamboo {report.bamboo}"]
    states = []
    if not report.complete:
        states.append("This run is not complete: the same command goes on.")
    if report.quick:
        states.append("Made with --quick: the figures of tiny sizes say nothing about real ones.")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>bamboo bench, {escape(devices)}</title><style>{STYLE}</style></head><body>",
            f"<h1>bamboo bench</h1><p>{escape(', '.join(facts))}</p>",
            *(f'<p class="state">{escape(text)}</p>' for text in states),
            *map(_section, tables),
            "</body></html>\n",
        ]
    )


def _section(table: BenchTable) -> str:
    kind = ' class="facts"' if len(table.columns) == 2 else ""
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.columns)
    bars = table.bars or (None,) * len(table.rows)
    rows = "\n".join(_row(table.columns, cells, bar) for cells, bar in zip(table.rows, bars, strict=True))
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<section><h2>{escape(table.title)}</h2>{note}<div class=wide><table{kind}><thead><tr>{heads}</tr></thead>"
        f"<tbody>\n{rows}\n</tbody></table></div></section>"
    )


def _row(columns: Sequence[str], cells: Sequence[str], bar: float | None) -> str:
    """A row; on a narrow page each cell is a line with its column's name."""
    first = "" if bar is None else f' class="bar" style="--part: {100 * bar:.0f}%"'
    rest = "".join(
        f'<td data-label="{escape(column)}"{_colour(text)}><span>{escape(text).replace(" %", "&nbsp;%")}</span></td>'
        for column, text in zip(columns[1:], cells[1:], strict=True)
    )
    return f"<tr><td{first}>{escape(cells[0])}</td>{rest}</tr>"


def _colour(text: str) -> str:
    if any(word in text for word in BAD):
        return ' class="bad"'
    return ' class="good"' if text in GOOD else ""
