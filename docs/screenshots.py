"""Makes the pictures in docs/images: a real run of the quickstart loses a worker and has another one leave.

    python docs/screenshots.py [FOLDER]

Needs Chromium. The pages are those of the run; nothing is made up.
"""

import asyncio
import contextlib
import io
import re
import sys
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from bamboo.local.runner import RunOptions, run_job  # noqa: E402
from bamboo.local.views.page_view import PageView  # noqa: E402
from bamboo.preemption import scheduling  # noqa: E402
from bamboo.terminal.keys import Keys  # noqa: E402
from bamboo.terminal.picture import SHOWN_EVENTS, Footer, render  # noqa: E402
from bamboo.terminal.view import CombinedView, StopJob, UserRequest  # noqa: E402
from bamboo_core.coordinator.events import Emit, Status  # noqa: E402
from bamboo_core.job.manifest import parse_manifest  # noqa: E402
from bamboo_core.job.yaml_file import load_document  # noqa: E402
from chromium_kit import MISSING, Tab, browser, chromium  # noqa: E402

JOB = ROOT / "examples/quickstart.yaml"
LOSSES = ["at:14:2", "at:30:1:notice"]
STEP = 40  # at which the pictures are taken
SECONDS = 600.0
COLUMNS = 118


class Terminal:
    """What the live view of `bamboo run` would show at the moment."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._events: deque[tuple[float, Emit]] = deque(maxlen=SHOWN_EVENTS)
        self._began = 0.0
        self.newest: Status | None = None
        self.quit: Callable[[], None] = lambda: None

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self._began = asyncio.get_running_loop().time()
        self.quit = lambda: request(StopJob())

    def status(self, status: Status) -> None:
        self.newest = status

    def emit(self, emit: Emit) -> None:
        self._events.append((asyncio.get_running_loop().time() - self._began, emit))

    def stop(self) -> None:
        pass

    def picture(self) -> str:
        """As SVG, without the font that rich would have fetched from elsewhere."""
        assert self.newest is not None
        console = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True)
        elapsed, footer = asyncio.get_running_loop().time() - self._began, Footer(hints=Keys().hints())
        events, now = tuple(self._events), datetime.now(UTC)
        console.print(render(self._job, self.newest, events, elapsed=elapsed, now=now, footer=footer, width=COLUMNS))
        drawn = console.export_svg(title=f"bamboo run {JOB.relative_to(ROOT)}", unique_id="live-view")
        drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")
        assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
        return drawn


async def take(folder: Path) -> None:
    document = load_document(str(JOB))
    spec = parse_manifest(document)
    schedule = scheduling.parse(LOSSES, seed=0)
    terminal, page = Terminal(spec.name), PageView(spec)
    async with page.serving() as url, browser() as tab:
        run = asyncio.create_task(run_job(spec, document, RunOptions(preempt=schedule), CombinedView(page, terminal)))
        try:
            await look(tab, url, terminal, folder, run)
        finally:
            terminal.quit()
            await run


async def look(tab: Tab, url: str, terminal: Terminal, folder: Path, run: "asyncio.Task[object]") -> None:
    await tab.size(1280, 900)
    await tab.media(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    await tab.goto(url)
    async with asyncio.timeout(SECONDS):
        while terminal.newest is None or terminal.newest.step < STEP or len(terminal.newest.takeovers) < len(LOSSES):
            assert not run.done(), "the run ended early"
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.2)  # the page asks once a second
    (folder / "live-view.svg").write_text(terminal.picture())
    await tab.screenshot(folder / "job-page.png", height=1430)
    await tab.media(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    await tab.size(390, 844, phone=True, scale=2)
    await asyncio.sleep(1.2)
    await tab.screenshot(folder / "job-page-phone.png", height=844)
    assert not tab.errors, tab.errors


def main() -> None:
    if chromium() is None:
        sys.exit(MISSING)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(folder))
    for file in sorted(folder.iterdir()):
        with contextlib.suppress(ValueError):
            file = file.relative_to(Path.cwd())
        print(file)


if __name__ == "__main__":
    main()
