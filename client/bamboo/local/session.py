"""The command `bamboo run`, which runs a job, with --verify a second time for comparison, and reports its outcome."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bamboo import loop_signals, stop_signals
from bamboo.job_source import JobSource
from bamboo.local.closing import Closing
from bamboo.local.fork_server import ForkServerError
from bamboo.local.output_folder import OutputRefused, only_run_in
from bamboo.local.run_options import ReportOptions
from bamboo.local.runner import RunOptions, run_job
from bamboo.local.scheduling import Schedule
from bamboo.local.views.page_view import PageView
from bamboo.local.views.summary import Summary, compare, steps_done, to_json, to_text
from bamboo.terminal.live_view import LineScreen, LiveView, PictureScreen
from bamboo.terminal.view import CombinedView, RunView
from bamboo_core.complaints import complain
from bamboo_core.coordinator.events import Outcome
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.names import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from bamboo_core.page.server import PageError
from bamboo_core.page.standalone import NAME as PAGE
from bamboo_core.page.standalone import standalone_page
from bamboo_core.storage.local_files import whole_file
from bamboo_core.text import count, wrapped

DIFFERENT = (
    "the task does not do the same twice, with random numbers of Python or numpy, say, or by the clock "
    "(docs/models.md, The same bits each time); if it does, this is a bug in Bamboo"
)


def train(job: JobSource, options: RunOptions, report: ReportOptions) -> int:
    """Run the job, report on it, and return the exit code."""
    try:
        with stop_signals.held(), only_run_in(options.output):  # a late signal takes effect after the report
            summary = loop_signals.run(lambda: _shown(job, options, report))
            if not report.verify or summary.outcome is not Outcome.COMPLETE:
                return _conclude(summary, None, json=report.json)
            again = undisturbed_job(job, summary)
            if not report.json:
                _say(f"{to_text(summary)}\nthe same job again, undisturbed, {_grid(again.spec)}:")
        calm = replace(options, preempt=Schedule(), output=None, trace=None)
        view = _view(replace(again.spec, name=f"{job.spec.name}, undisturbed"), report)
        check = loop_signals.run(lambda: run_job(again, calm, view))
    except (PageError, OutputRefused) as error:
        complain(error)
        return EXIT_USAGE
    except ForkServerError as error:
        complain(error)
        return EXIT_FAILED
    except OSError as error:
        complain(error, "while the job was run")
        return EXIT_FAILED
    return _conclude(summary, check, json=report.json)


def undisturbed_job(job: JobSource, ran: Summary) -> JobSource:
    """Return the job for the second run of --verify, on another grid if possible.

    It has no replicas, standby workers, checkpoints or budget. Its grid has one pipeline less than the manifest's grid
    or, if the coordinator chose the grid, than the last grid of `ran`. A single pipeline loses one stage instead: its
    longer stages need no more memory than stages with replicas. The grid of a single pipeline stays the same if it has
    one stage, or if its workers had no room for replicas.
    """
    spec, topology = job.spec, job.spec.topology
    stages, pipelines = ran.grid if spec.elastic and ran.grid else (topology.stages, topology.pipelines)
    split = topology.split
    if pipelines > 1:
        pipelines -= 1
    elif stages > 1 and not ran.status.lacks_room:
        stages, split = stages - 1, None
    changed = deepcopy(job.document)
    part = changed["spec"]
    part["topology"] = {"stages": stages, "pipelines": pipelines}
    if split is not None:
        part["topology"]["split"] = list(split)
    part["redundancy"] = {"mode": RedundancyMode.NONE.value}
    for name in ("elastic", "standby", "checkpoint", "budget"):
        part.pop(name, None)
    return replace(job, spec=parse_manifest(changed), document=changed)


def _grid(spec: JobSpec) -> str:
    topology = spec.topology
    return f"with {count(topology.stages, 'stage')} and {count(topology.pipelines, 'pipeline')}"


async def _shown(job: JobSource, options: RunOptions, report: ReportOptions) -> Summary:
    """Run the job and show it in the terminal. If `report` has a port, serve its page and print the URL."""

    def view(url: str) -> RunView:
        if url:
            print(f"page: {url}", file=sys.stderr if report.json or report.quiet else sys.stdout, flush=True)
        return _view(job.spec, report, page=url)

    return await run_with_page(job, options, view, port=report.port)


async def run_with_page(
    job: JobSource, options: RunOptions, view: Callable[[str], RunView], *, port: int | None
) -> Summary:
    """Run the job, serve its page meanwhile, and write the final page into the output folder, if there is one.

    view: returns the user's view for the page's URL, "" without a page. port: 0 for any, None for no page. Raises
    PageError if the page cannot be served, and what `run_job` raises.
    """
    page = PageView(job.spec, port=port or 0)
    async with contextlib.nullcontext("") if port is None else page.serving() as url:
        summary = await run_job(job, options, CombinedView(page, view(url)))
        page.finish(summary)
    if options.output is not None:
        file = options.output / PAGE
        ending = Closing()
        ending.do(f"while the page was written, {file}", lambda: _write_page(page, file))
        ending.tell()
    return summary


def _write_page(page: PageView, file: Path) -> None:
    content = standalone_page(page.document()).encode()
    with whole_file(file) as written:
        written.write(content)


def _conclude(summary: Summary, check: Summary | None, *, json: bool) -> int:
    """Print the summary, or its comparison with `check`, the undisturbed run's summary; return the exit code."""
    if check is None:
        _say(to_json(summary) if json else to_text(summary))
        return summary.exit_code
    equal = compare(summary.status.digests, check.status.digests) if check.outcome is Outcome.COMPLETE else None
    if json:
        _say(to_json(summary, bit_equal=equal))
    if equal is None:
        print(f"not compared, the undisturbed run did not complete:\n{to_text(check)}", file=sys.stderr)
        return check.exit_code
    if not json:
        _say(f"  {steps_done(check)} in {check.seconds:.1f} s")
        _say("bit-equal: " + ("yes" if equal else f"no, the final states differ; {DIFFERENT}"))
    return EXIT_OK if equal else EXIT_FAILED


def _view(spec: JobSpec, report: ReportOptions, page: str = "") -> RunView:
    if report.json or report.quiet:
        return CombinedView()
    lines = report.debug or not _in_foreground()
    return LiveView(spec, LineScreen(_say) if lines else PictureScreen(Console(), page))


def _in_foreground() -> bool:
    """Return whether standard output is a terminal whose shell runs this process in the foreground."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(sys.stdout.fileno()) == os.getpgrp()
    return False


def _say(text: str) -> None:
    """Print text; on a terminal, break its lines between words."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(wrapped(text, width) if width else text, flush=True)
