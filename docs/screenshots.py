"""Take the screenshots of the job page in a real run of the quickstart, in which one worker is lost and one leaves.

    python docs/screenshots.py [FOLDER]

FOLDER is docs/images by default. Needs Chromium. The screenshots show the page of this run, without invented data.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from bamboo.job_source import source_of_file  # noqa: E402
from bamboo.local import scheduling  # noqa: E402
from bamboo.local.runner import RunOptions, run_job  # noqa: E402
from bamboo.local.views.page_view import PageView  # noqa: E402
from bamboo.terminal.view import CombinedView, StopJob, UserRequest  # noqa: E402
from bamboo_core.coordinator.events import Emit, Status  # noqa: E402
from chromium_kit import MISSING, Tab, browser, chromium  # noqa: E402

JOB = ROOT / "examples/quickstart.yaml"
LOSSES = ["at:14:2", "at:30:1:notice"]
STEP = 40  # at which the pictures are taken
SECONDS = 600.0


class Newest:
    """A view of a run that keeps the newest status, and can stop the run."""

    def __init__(self) -> None:
        self.status_now: Status | None = None
        self.quit: Callable[[], None] = lambda: None

    def start(self, request: Callable[[UserRequest], None]) -> None:
        self.quit = lambda: request(StopJob())

    def status(self, status: Status) -> None:
        self.status_now = status

    def emit(self, emit: Emit) -> None:
        pass

    def stop(self) -> None:
        pass


async def take(folder: Path) -> None:
    job = source_of_file(str(JOB))
    schedule = scheduling.parse(LOSSES, seed=0)
    newest, page = Newest(), PageView(job.spec)
    async with page.serving() as url, browser() as tab:
        run = asyncio.create_task(run_job(job, RunOptions(preempt=schedule), CombinedView(page, newest)))
        try:
            await look(tab, url, newest, folder, run)
        finally:
            newest.quit()
            await run


async def look(tab: Tab, url: str, newest: Newest, folder: Path, run: "asyncio.Task[object]") -> None:
    await tab.size(1280, 900)
    await tab.media(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    await tab.goto(url)
    async with asyncio.timeout(SECONDS):
        while not (seen := newest.status_now) or seen.step < STEP or len(seen.takeovers) < len(LOSSES):
            assert not run.done(), "the run ended early"
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.2)  # the page asks once a second
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
