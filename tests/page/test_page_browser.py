"""The job page in a real browser: drawings, names for screen readers, and messages about problems."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.coordinator.events import CheckpointWrite, Emit, Outcome, SlowWorker, Status, WorkerState
from bamboo_core.job.status import read_status
from bamboo_core.page.document import Document, PoolCost, document
from bamboo_core.page.server import add_page, answer, bearer, refusal
from bamboo_core.page.standalone import standalone_page
from bamboo_core.page.timeline import JobTimeline, Point, StepFigures, steady_clock
from bamboo_core.view.job_view import ended
from chromium_kit import MISSING, Tab, chromium, started, tab_of
from http_kit import serving
from manifest_kit import training
from operator_kit import at, checkpoints, job, said, takeover, viewed
from page_kit import written

pytestmark = pytest.mark.skipif(chromium() is None, reason=MISSING)

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
SPIRALS = """
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: spirals}
spec:
  task: {entrypoint: "bamboo_trainer.models.mlp:build", config: {width: 32, blocks: 4, learningRate: 0.05}}
  training: {steps: 400, globalBatchSize: 64, microBatchSize: 16, maxGradientNorm: 1.0}
  topology: {stages: 3}
  standby: {workers: 1}
"""


DRAWN = "document.getElementById('main')?.hidden === false"


def page(*, over: bool = False, told: int = 1) -> Document:
    """Return the document of a job with everything that a page can show. told: number of WorkerLost events."""
    record = JobTimeline()
    record.follow(0, StepFigures(None), ())
    taken = takeover(step=2)
    for step in range(1, 6):
        record.follow(step, StepFigures(6.0 - step, 0.5 * step, 1e-3), (taken,) if step > 2 else ())
    for _ in range(told):
        record.add_event(Emit("WorkerLost", HOSTILE, True))
    record.add_event(Emit("Restored", "the job goes on from the checkpoint of step 3, and repeats 2 steps", True))
    for step in (3, 4, 5):
        record.follow(step, StepFigures(6.0 - step, 0.5 * step, 1e-3), (taken,))
    kept = checkpoints(
        step=3,
        age=125.0,
        restores=1,
        repeated=2,
        repeated_seconds=61.0,
        every_steps=3,
        bytes=3 << 30,
        place=f"s3://bucket/{'long' * 30}/{HOSTILE}",
        writing=CheckpointWrite(step=6, seconds=4.0, written=3, layers=32),
    )
    status = said(
        grid=((("tiny-w0", True), ("tiny-w0", False)), (("tiny-w9", True), ("tiny-w3", True))),
        workers=(("tiny-w0", WorkerState.TRAINING), ("tiny-w3", WorkerState.LEAVING), ("tiny-w4", WorkerState.STANDBY)),
        step=5,
        takeovers=(taken,),
        preemptions=1,
        memory=(("tiny-w0", Memory(peak=10 << 20, limit=16 << 20)),),
        checkpoint=kept,
        traffic=(("tiny-w0", Traffic(sync=7 << 20, state=1)),),
        evaluations=((2, {"loss": 1.5}), (4, {"loss": 2.5})),
        best_evaluation=2,
        slow=(SlowWorker(worker="tiny-w3", pipeline=1, stage=1, seconds=0.2, usual=0.1, sentence="w3 is slow"),),
    )
    counts = written(preemptions=1, takeovers=1, restores=1, cost={"total": "12.5000", "perHour": "3"})
    return drawn(status, record, counts, over=over)


def drawn(live: Status | None, record: JobTimeline | None, status: dict[str, Any], *, over: bool = False) -> Document:
    """Return the document of a job with a hostile name. live: the coordinator's status. status: the one in the API."""
    now = steady_clock()()
    spec = job(training=training(10, 8, 2, evaluation={"everySteps": 2}), checkpoint={"storage": "s3://bucket/x"})
    pools = (PoolCost(name="spot", capacity="Spot", workers=3, price="1.00"),)
    end = ended(Outcome.COMPLETE, "all steps are done") if over else None
    view = viewed(spec, read_status(status), live=live)
    found = document(view, record, place="cluster", now=now, pools=pools, ended=end)
    about = structs.replace(found.job, name=HOSTILE, namespace=HOSTILE, began=now - 60, since=now)
    return structs.replace(found, job=about)


@pytest.fixture(scope="module")
def chrome() -> Iterator[str]:
    """Start a browser, and yield its DevTools address."""
    with started() as address:
        yield address


@asynccontextmanager
async def served(found: list[Document | int]) -> AsyncIterator[str]:
    """Serve a page of the last item of `found`, a document or an HTTP error; 401 without a token. Yield its URL."""

    async def state(request: web.Request) -> web.Response:
        newest = found[-1] if bearer(request.headers) else 401
        return refusal(newest, "It is not to be.") if isinstance(newest, int) else answer(newest)

    app = web.Application()
    add_page(app, "/jobs/team/tiny/", state)
    async with serving(app) as url:
        yield f"{url}/jobs/team/tiny/"


async def test_what_is_drawn_and_what_a_screen_reader_hears(chrome: str) -> None:
    async with served([page()]) as url, tab_of(chrome) as tab:
        await tab.size(1280, 900)
        await tab.goto(f"{url}#token=secret")
        await tab.until(DRAWN)
        assert await tab.value("location.href") == url, "the token stays in sight"
        tree = await tab.tree()
        roles = [role for role, _ in tree]
        assert ("heading", HOSTILE) in tree
        assert ("heading", "Recovering") in tree
        assert ("columnheader", "Stage 1") in tree
        assert ("rowheader", "Pipeline 0") in tree
        assert any(role == "cell" and "w0 training 2 stages unprotected" in name for role, name in tree), tree
        assert any(role == "cell" and "w9 lost" in name for role, name in tree)
        assert any(role == "cell" and "w3 leaving slow protected" in name for role, name in tree)
        assert any(role == "image" and re.match(r"Loss: 1\.0000 at step 5; lowest", name) for role, name in tree)
        assert ("progressbar", "Steps done") in tree
        assert {"main", "banner", "table", "list", "region", "time"} <= {*roles, "banner"}
        text = await tab.value("document.body.innerText")
        for part in (
            HOSTILE,
            "w0 took over stage 1 of pipeline 0 from w1",
            "pause 100 ms",
            "decide 1.0 ms",
            "recompute 79 ms",
            "2 forwards and 3 backwards repeated",
            "w4 standby",
            "12.50",
            "3.00 an hour",
            "the job goes on from the checkpoint of step 3, and repeats 2 steps",
            "2 min 5 s",
            "3.0 GiB in 1.00 s",
            "step 6, 3 of 32 layers",
            "s3://bucket/long",
            "2 (1 min 1 s)",
            "writing step 6",
            "after step 4; best 1.5",
            "after step 2",
        ):
            assert part in text, (part, text)
        assert await tab.value("document.querySelectorAll('#plot-loss .mark.restore').length") == 1
        assert await tab.value("document.querySelectorAll('#plot-marks .sign.restore').length") == 1
        assert await tab.value("document.querySelectorAll('main img, main script, [onerror]').length") == 0
        assert not (await tab.value("document.title")).startswith("taken")
        assert all(request.startswith(url) for request in tab.requests), tab.requests
        assert tab.errors == []


async def test_a_job_without_a_coordinator_is_drawn_from_its_status(chrome: str) -> None:
    status = written(
        "Suspended",
        training={"step": 8, "steps": 10, "loss": 2.5, "evaluation": {"step": 6, "metrics": {"loss": 2.25}}},
        checkpoint={"lastStep": 8, "lastTime": at(-90)},
        restores=2,
        takeovers=7,
        plan='{"pipelines":[["tiny-w0","tiny-w2"]]}',
    )
    async with served([drawn(None, None, status)]) as url, tab_of(chrome) as tab:
        await tab.goto(f"{url}#token=secret")
        await tab.until(DRAWN)
        text = await tab.value("document.body.innerText")
        for part in ("It is Suspended.", "step 8 of 10, 80 %", "2.5000", "after step 6", "s3://bucket/x", "2 times"):
            assert part in text, (part, text)
        assert await tab.text("#grid-body td") == "w0\nunknown"
        assert tab.errors == []


async def pointer(tab: Tab, plot: str, *moves: tuple[str, float]) -> None:
    """Send mouse events to a plot. moves: "mouseMoved", "mousePressed" or "mouseReleased", at a share of its width."""
    await tab.value(f"document.querySelector('#plot-{plot}').scrollIntoView({{block: 'center'}})")
    box = await tab.value(
        f"(() => {{ const box = document.querySelector('#plot-{plot}').getBoundingClientRect();"
        " return [box.left, box.top, box.width, box.height]; })()"
    )
    for kind, share in moves:
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        place = {"x": box[0] + box[2] * share, "y": box[1] + box[3] / 2}
        await tab.call("Input.dispatchMouseEvent", type=kind, **place, **pressed)


async def press(tab: Tab, *keys: str) -> None:
    for key in keys:
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        await tab.call("Input.dispatchKeyEvent", type="keyUp", key=key)


def curves_of(steps: int) -> Document:
    """Return the document of a job that committed `steps` steps, one every ten seconds."""
    points = tuple(Point(k, 1e9 + 10.0 * k, StepFigures(1 / k, 0.5 * k, 1e-5 * k)) for k in range(1, steps + 1))
    found = page(over=True)
    assert found.live is not None
    live = replace(found.live, gradient_norm=0.5 * steps, learning_rate=1e-5 * steps)
    mark = replace(found.marks[0], at=1e9 + 10.0 * steps / 2)
    return structs.replace(found, now=1e9 + 1e4, points=points, live=live, marks=(mark,))


LABELS = "[...document.querySelectorAll('#plot-loss .along')].map((text) => text.textContent)"
TIPS = "[...document.querySelectorAll('.tip:not([hidden])')].map((tip) => [tip.parentElement.id, tip.innerText])"


async def test_curves_are_read_and_zoomed_with_mouse_and_keys(chrome: str) -> None:
    """The chart under the pointer shows the values there; dragging over a range, or the key +, zooms in."""
    async with served([curves_of(101)]) as url, tab_of(chrome) as tab:
        await tab.size(1280, 900)
        await tab.goto(f"{url}#token=secret")
        await tab.until(DRAWN)
        text = await tab.value("document.body.innerText")
        assert "Curves" in text
        assert "learning rate 0.00101" in text
        assert await tab.value(LABELS) == ["start", "5 min", "10 min", "15 min"]
        await pointer(tab, "norm", ("mouseMoved", 0.5))
        ((plot, tip),) = await tab.value(TIPS)
        assert plot == "plot-norm"
        said = re.match(r"([\d.]+) gradient norm\s+step (\d+), ", tip)
        assert said, tip
        assert (float(said[1]), 44 < int(said[2]) < 52) == (int(said[2]) / 2, True)
        await pointer(tab, "norm", ("mouseMoved", -0.1))
        assert await tab.value(TIPS) == []
        await tab.value("document.querySelector('input[value=step]').click()")
        assert await tab.value(LABELS) == ["20", "40", "60", "80", "100"]
        drag = (("mouseMoved", 0.3), ("mousePressed", 0.3), ("mouseMoved", 0.5), ("mouseReleased", 0.5))
        await pointer(tab, "loss", *drag)
        low, high = (int(label) for label in (await tab.value(LABELS))[:: len(await tab.value(LABELS)) - 1])
        assert 25 <= low < high <= 55
        shown = await tab.value(
            "[...document.querySelectorAll('#curves-body th')].map((head) => Number(head.textContent))"
        )
        assert 20 < shown[0] < shown[-1] < 55, "the table is not of what is in sight"
        await tab.value("document.getElementById('zoom-all').click()")
        assert await tab.value(LABELS) == ["20", "40", "60", "80", "100"]
        assert await tab.value("document.getElementById('zoom-all').disabled")
        await tab.value("document.getElementById('plots').focus()")
        await press(tab, "Home", "ArrowRight")
        assert "step 2" in await tab.text("#curves-said")
        assert "gradient norm 1," in await tab.text("#curves-said")
        assert len(await tab.value(TIPS)) == 4
        await press(tab, "+", "+", "+")
        assert max(int(label) for label in await tab.value(LABELS)) < 20
        await press(tab, "End")
        assert "step 101" in await tab.text("#curves-said")
        assert max(int(label) for label in await tab.value(LABELS)) >= 100, "what is in sight goes with the keys"
        await press(tab, "0")
        assert await tab.value(LABELS) == ["20", "40", "60", "80", "100"]
        assert tab.errors == []


TICKS = """(plot) => [...document.querySelectorAll(`#plot-${plot} text.tick.left`)].map((text) => text.textContent)"""


@pytest.mark.parametrize(("first", "last"), [(0, 4), (0, 29), (60, 64), (95, 99)])
async def test_a_burst_leaves_the_curves_their_scale(chrome: str, first: int, last: int) -> None:
    """Curves keep their scale though some of 100 steps come at nearly one moment, and one has outlying values."""
    found = curves_of(100)
    points = list(found.points)
    for number in range(first, last):
        points[number] = points[number]._replace(at=points[last].at - 0.001 * (last - number))
    points[30] = points[30]._replace(figures=StepFigures(900.0, 3e5))
    found = structs.replace(found, points=tuple(points))
    async with served([found]) as url, tab_of(chrome) as tab:
        await tab.size(1280, 900)
        await tab.goto(f"{url}#token=secret")
        await tab.until(DRAWN)
        highest = {plot: float((await tab.value(f"({TICKS})('{plot}')"))[-1]) for plot in ("loss", "rate", "norm")}
        assert highest["loss"] <= 1.5
        assert highest["rate"] <= 5.0, "eight samples in ten seconds, and so over the burst with its pause"
        assert highest["norm"] <= 75.0
        beyond = "[...document.querySelectorAll('.beyond')].map((text) => text.textContent)"
        assert {"up to 900", "up to 300K"} <= set(await tab.value(beyond))
        told = await tab.value("document.querySelector('#plot-loss svg').getAttribute('aria-label')")
        assert "highest 900" in told
        assert tab.errors == []


async def test_a_kept_page_needs_no_server(tmp_path: Path, chrome: str) -> None:
    """The file opens from a folder, requests nothing else, and shows the job's name as text, not as HTML."""
    file = tmp_path / "page.html"
    file.write_text(standalone_page(curves_of(50)), encoding="utf-8")
    async with tab_of(chrome) as tab:
        await tab.goto(file.as_uri())
        await tab.until(DRAWN)
        assert (await tab.text("#connection-text")).startswith("kept ")
        assert await tab.text("#state-name") == "Complete"
        assert await tab.text("#name") == HOSTILE
        assert not (await tab.value("document.title")).startswith("taken")
        assert await tab.value("document.querySelectorAll('#plot-loss path.curve').length") == 1
        await tab.value("document.querySelector('input[value=step]').click()")
        assert await tab.value(LABELS) == ["10", "20", "30", "40", "50"]
        assert await tab.value("document.getElementById('trouble').hidden")
        assert [request for request in tab.requests if not request.startswith("data:")] == [file.as_uri()]
        assert tab.errors == []


FONTS = {  # rules that make text wider than any font: no layout may rely on the fonts of one machine
    "its own": "",
    "one twice as wide": "* { letter-spacing: .6em !important; }",
    "large type": ":root { font-size: 32px !important; }",
}
WIDEST = """(() => {
  const room = document.documentElement.clientWidth;
  const wide = [...document.body.querySelectorAll("*")].filter((part) => {
    const scrolled = part.parentElement.closest(".scroll, .plot, .unseen");
    return !scrolled && part.getBoundingClientRect().right > room + 0.5;
  });
  return wide.map((part) => `${part.tagName} ${part.id} ${part.className} ${part.getBoundingClientRect().right}`);
})()"""
TAIL = """document.documentElement.scrollHeight - scrollY
  - Math.max(innerHeight, document.body.getBoundingClientRect().bottom)"""


async def test_it_fits_every_screen_with_any_font(chrome: str) -> None:
    """From 320 px on, only content of plots and scrolling boxes may overflow the window; no space follows the body."""
    async with served([page(told=100)]) as url, tab_of(chrome) as tab:
        for font, rules in FONTS.items():
            await tab.size(1280, 900)
            await tab.goto("about:blank")  # so that the same address is loaded again
            await tab.goto(f"{url}#token=secret")
            await tab.until(DRAWN)
            await tab.value(
                f"(() => {{ const own = new CSSStyleSheet(); own.replaceSync({json.dumps(rules)});"
                " document.adoptedStyleSheets = [own]; document.querySelector('details').open = true; })()"
            )
            for width in (1280, 768, 390, 320):
                await tab.size(width, 844, phone=width < 500)
                await tab.until(f"document.querySelector('#plot-loss svg').clientWidth <= {width}")  # drawn anew
                assert await tab.value(WIDEST) == [], (font, width)
                assert await tab.value("document.documentElement.scrollWidth") <= width, font
                assert await tab.value(TAIL) <= 1, (font, width)


async def test_what_is_said_when_something_is_wrong(chrome: str) -> None:
    found: list[Document | int] = [page()]
    async with served(found) as url, tab_of(chrome) as tab:
        await tab.goto(url)
        await tab.until("!document.getElementById('ask').hidden")
        assert "needs a token" in await tab.text("#trouble")
        assert await tab.value("document.activeElement.id") == "token"
        await tab.value("document.getElementById('token').value = 'secret'")
        await tab.value("document.querySelector('#ask button').click()")
        await tab.until(DRAWN)
        await tab.until("document.getElementById('trouble').hidden")
        found.append(503)
        await tab.until("document.getElementById('trouble').innerText.includes('The page shows the state at')")
        assert re.fullmatch(r"no connection since \d\d:\d\d:\d\d", await tab.text("#connection-text"))
        assert "role=alert" in await tab.value("'role=' + document.getElementById('trouble').getAttribute('role')")
        found.append(page(over=True))
        await tab.until("document.getElementById('connection-text').innerText === 'ended'")
        assert await tab.value("document.getElementById('trouble').hidden")
        assert "Complete" in await tab.text("#announcer")
        found.append(401)
        await tab.goto(url)
        await tab.until("!document.getElementById('ask').hidden")
        assert "paste another" in await tab.text("#trouble")
        assert await tab.value("sessionStorage.length") == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_real_run_with_preemptions(tmp_path: Path, chrome: str) -> None:
    """The page follows a run from its printed URL to the end of the job."""
    path = tmp_path / "job.yaml"
    path.write_text(SPIRALS)
    output = tmp_path / "output"
    command = [
        "-m",
        "bamboo",
        "run",
        str(path),
        "--output",
        str(output),
        "--preempt",
        "at:30:1",
        "--preempt",
        "at:120:0:notice",
    ]
    run = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert run.stdout is not None
    try:
        url = (await run.stdout.readline()).decode().removeprefix("page: ").strip()
        said_by_run = asyncio.create_task(run.stdout.read())
        async with tab_of(chrome) as tab:
            await tab.size(390, 844, phone=True)
            await tab.goto(url)
            await tab.until("document.querySelectorAll('#timeline-list li.takeover').length === 2", 120)
            assert await tab.value("document.querySelectorAll('#grid-body td').length") == 3
            assert await tab.value("document.querySelectorAll('#plot-loss path.curve').length") == 1
            timeline = await tab.text("#timeline-list")
            assert "is lost: " in timeline
            assert "with notice" in timeline
            assert await tab.value("document.documentElement.scrollWidth") == 390
            await tab.until("document.getElementById('state-name').innerText === 'Complete'", 240)
            assert await tab.text("#connection-text") == "ended"
            assert "step 400 of 400" in await tab.text("#steps")
            assert tab.errors == []
            assert all(request.startswith(url.partition("#")[0]) for request in tab.requests)
        assert await run.wait() == 0
        assert b"Complete" in await said_by_run
        async with tab_of(chrome) as tab:
            await tab.goto((output / "page.html").as_uri())
            await tab.until(DRAWN)
            assert await tab.text("#state-name") == "Complete"
            assert "learning rate 0.05" in await tab.text("#tiles")
            assert await tab.value("document.querySelectorAll('#timeline-list li.takeover').length") == 2
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()
