"""HTML of a job in a notebook: progress and loss curve. Pure."""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from bamboo.jobs.results import JobProgress
from bamboo_core.text import count

WIDTH: Final = 480  # of the curve, in pixels
HEIGHT: Final = 120
MOST_POINTS: Final = 240


def handle_html(progress: JobProgress, losses: Sequence[tuple[int, float | None]]) -> str:
    """Return HTML with a job's state, grid, lost workers, link to its page, and loss curve. losses: (step, loss)."""
    lines = [f"<b>{escape(progress.name)}</b>: {escape(progress.state)}", *map(escape, _facts(progress))]
    if progress.message:
        lines.append(escape(progress.message))
    if progress.page:
        lines.append(f'<a href="{escape(progress.page, quote=True)}" target="_blank">the page of this run</a>')
    return f'<div style="font-family:sans-serif">{"<br>".join(lines)}{loss_curve(losses)}</div>'


def _facts(progress: JobProgress) -> list[str]:
    lines = [", ".join(progress.facts())]
    if progress.grid:
        pipelines, stages = len(progress.grid), max(map(len, progress.grid))
        lines.append(f"{count(pipelines, 'pipeline')} of {count(stages, 'stage')}; {count(progress.workers, 'worker')}")
    lost = "" if progress.lost_samples is None else f", {count(progress.lost_samples, 'sample')} left out"
    lines.append(f"{count(progress.preemptions, 'worker')} lost, {count(progress.takeovers, 'takeover')}{lost}")
    return lines


def loss_curve(losses: Sequence[tuple[int, float | None]]) -> str:
    """Return the curve of the finite losses as SVG; "" if there are fewer than two. losses: (step, loss)."""
    finite = [(step, loss) for step, loss in losses if loss is not None and math.isfinite(loss)]
    if len(finite) < 2:
        return ""
    shown = finite[:: math.ceil(len(finite) / MOST_POINTS)]
    least, most = min(loss for _, loss in finite), max(loss for _, loss in finite)
    first, last = finite[0][0], finite[-1][0]
    points = " ".join(
        f"{(step - first) / (last - first) * WIDTH:.1f},{HEIGHT - (loss - least) / (most - least or 1) * HEIGHT:.1f}"
        for step, loss in shown
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT + 20}" viewBox="-4 -4 {WIDTH + 8} {HEIGHT + 24}" role="img"'
        f' aria-label="loss from {most:.4g} to {least:.4g}"><polyline fill="none" stroke="#2a7f3f" stroke-width="2"'
        f' points="{points}"/><text x="0" y="{HEIGHT + 16}" font-size="12" fill="currentColor">loss, steps {first} to'
        f" {last}: {finite[0][1]:.4g} to {finite[-1][1]:.4g}</text></svg>"
    )
