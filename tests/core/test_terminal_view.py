"""What a run tells: the live picture, plain lines, the summary and the trace."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bamboo.control.memory import Memory
from bamboo.coordinator.events import CheckpointWrite, Emit, Finish, Outcome, SlowWorker, Status, Takeover, WorkerState
from bamboo.local.trace_files import merge_traces
from bamboo.local.views.summary import compare, summarize, to_json, to_text
from bamboo.planning.plan import Cell
from bamboo.terminal.keys import HELP, Keys, letter, worker_of
from bamboo.terminal.picture import Footer, render, sparkline
from bamboo.terminal.view import PlainView, StopJob, TakeWorker
from bamboo_trainer.telemetry.trace import TraceFile
from operator_kit import checkpoints

TAKEOVER = Takeover(
    epoch=2, victim="w1", worker="w0", pipeline=0, stage=1, step=7, notice=False,
    decide_ms=1.0, reform_ms=20.0, recompute_ms=79.0, forwards=2, backwards=3,
)  # fmt: skip
STATUS = Status(
    phase="Running", epoch=2, step=3, steps=10, first_loss=3.0, loss=1.5, losses=(3.0, 2.0, 1.5), lost_samples=4,
    step_seconds=0.2, samples_per_second=40.0, eta_seconds=1.4, grid=((("w0", True), ("w2", False)),),
    workers=(("w0", WorkerState.TRAINING), ("w2", WorkerState.TRAINING), ("w3", WorkerState.STANDBY)),
    preemptions=1, notices=0, takeovers=(TAKEOVER,), unprotected=("pipeline 0 stage 1",), digests=("aa", "bb"),
    memory=(("w0", Memory(log=7)), ("w2", Memory(parameters=3))),
    most_memory=("w1", Memory(log=3 << 20, optimizer=1536)),
    slow=(SlowWorker(worker="w0", pipeline=0, stage=0, seconds=0.2, usual=0.1, told="w0 is slow"),),
    metrics=(("accuracy", 0.123456), ("balance", 2e-7), ("nothing", None), ("x" * 64, 1.0)),
)  # fmt: skip


NOTHING = Footer()


def drawn(status: Status, *events: Emit, width: int = 120, elapsed: float = 90.0, footer: Footer = NOTHING) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    timed = [(float(n), event) for n, event in enumerate(events)]
    console.print(render("job", status, timed, elapsed=elapsed, footer=footer))
    return console.export_text()


def test_the_live_picture_shows_progress_grid_and_events() -> None:
    text = drawn(STATUS, Emit("TakenOver", "w0 [runs] stage 1", True))
    for part in (
        "job  training  1 preemption, 1 takeover",
        "step 3/10  1:30, ETA 1s",
        "40.0 samples/s  accuracy 0.1235  balance 2e-07  nothing -",
        "stage 1",
        "a w0 slow",
        "c w2 unprotected",
        "other workers: d w3 spare",
        "0s w0 [runs] stage 1",
    ):
        assert part in text
    assert "TakenOver" not in text  # the sentence says it
    early = drawn(replace(STATUS, grid=(), losses=(), loss=None, workers=(), eta_seconds=None, preemptions=0))
    assert "step 3/10  1:30" in early
    assert ("ETA" in early, "takeover" in early) == (False, False)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_wider_than_the_terminal_nor_cut_off(width: int) -> None:
    """Also with many stages, which stand below each other, and long sentences, which go on in the next line."""
    grid = tuple(tuple((f"w{16 * d + s}", bool(s % 3)) for s in range(16)) for d in range(2))
    workers = tuple((f"w{n}", WorkerState.TRAINING) for n in range(32))
    said = "w1 runs stage 2 of pipeline 0 in place of w3: pause 1374 ms, repeated 18 forwards, 15 backwards"
    footer = Footer(hints=HELP, page="http://127.0.0.1:1/")
    text = drawn(replace(STATUS, grid=grid, workers=workers), Emit("A", said), Emit("B", f"{said}; {said}"),
                 width=width, footer=footer)  # fmt: skip
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert f"0s {said} 1s {said}; {said}" in words
    assert all(f" w{n}" in text for n in range(32))
    assert [f"stage {s}" in text for s in range(16)] == [True] * 16
    assert any(said in line for line in text.splitlines()) is (width >= 100)


@pytest.mark.parametrize(("step", "filled"), [(0, 0), (3, 12), (10, 40)])
def test_the_bar_is_as_long_as_the_job_is_far(step: int, filled: int) -> None:
    assert f"{'█' * filled}{'░' * (40 - filled)}  step {step}/10" in drawn(replace(STATUS, step=step))


def test_the_picture_says_who_is_leaving_or_lost_and_keeps_the_newest_events() -> None:
    text = drawn(replace(STATUS, workers=(("w0", WorkerState.LEAVING),)), *(Emit(f"E{n}", f"e{n}") for n in range(9)))
    assert "a w0 leaving" in text
    assert "c w2 lost" in text
    assert (" e2" in text, " e3" in text) == (False, True)


def pressed(keys: Keys, *rest: str, at: float = 0.0) -> tuple[Keys, list[object]]:
    wishes: list[object] = []
    for key in rest:
        keys, request = keys.press(key, STATUS, at)
        wishes += [request] if request else []
    return keys, wishes


@pytest.mark.parametrize(
    ("typed", "wishes"),
    [
        ("a", []),
        ("aK", [TakeWorker("w0", notice=False)]),
        ("cN", [TakeWorker("w2", notice=True)]),
        ("ak", []),
        ("aqK", []),  # what does not answer a question closes it
        ("acK", []),
        ("K", []),
        ("A", []),
        ("zK", []),  # nobody's letter
        ("\x1b[A", []),  # an arrow
        ("q", []),
        ("qQ", [StopJob()]),
        ("qq", []),
        ("?aK", [TakeWorker("w0", notice=False)]),
    ],
)
def test_no_single_key_takes_a_worker_away_or_stops_the_job(typed: str, wishes: list[object]) -> None:
    assert pressed(Keys(), *typed)[1] == wishes


def test_a_question_is_shown_and_does_not_stand_for_ever() -> None:
    asked, _ = pressed(Keys(), "a")
    assert "Take w0 away?" in asked.question(1.0)
    assert "Take w0 away?" in drawn(STATUS, footer=Footer(question=asked.question(1.0), hints=asked.hints()))
    assert asked.question(11.0) == ""
    assert pressed(asked, "K", at=11.0)[1] == []


def test_help_is_shown_and_hidden_and_an_undisturbed_run_offers_no_workers() -> None:
    helped, _ = pressed(Keys(), "?")
    assert helped.hints() == HELP
    assert pressed(helped, "?")[0] == Keys()
    calm = Keys(disturb=False)
    assert (pressed(calm, "a", "K")[1], pressed(calm, "q", "Q")[1]) == ([], [StopJob()])
    assert "letter" not in " ".join((*calm.hints(), *pressed(calm, "?")[0].hints()))


def test_letters_lead_back_to_their_workers() -> None:
    assert "q" not in {letter(f"w{n}") for n in range(100)}
    assert [worker_of(letter(w), STATUS) for w, _ in STATUS.workers] == ["w0", "w2", "w3"]
    assert worker_of("z", STATUS) is None


def test_the_sparkline_has_a_bar_for_each_share() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline(list(range(1000)), width=40)) == 40
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([float("nan")]) == ""


def test_plain_lines_are_rare_and_events_are_not() -> None:
    lines: list[str] = []
    now = 0.0
    view = PlainView(lines.append, clock=lambda: now, stamp=lambda: "12:00:00")
    for step in range(1, 50):
        now = step / 10
        view.status(replace(STATUS, step=step))
    view.emit(Emit("Reason", "a sentence", True))
    assert len(lines) == 4
    assert lines[-1] == "12:00:00 ! Reason: a sentence"
    assert re.match(r"12:00:00 step \d+/10, loss", lines[0])
    view.emit(Emit("TaskFailed", "how it ended is for the summary to say", True, final=True))
    assert len(lines) == 4


def test_lines_have_the_time_of_day() -> None:
    lines: list[str] = []
    PlainView(lines.append).emit(Emit("Reason", "a sentence"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Reason: a sentence", lines[0])


def test_the_summary_as_text_and_json() -> None:
    finish = Finish(Outcome.COMPLETE, "Complete", "all steps are done")
    summary = summarize(
        "job",
        STATUS,
        finish,
        batch=8,
        seconds=2.0,
        sample="hello\nworld\x1b[2J",
        crashes=tuple(f"w{n}" for n in range(7)),
    )
    text = to_text(summary)
    assert "w1 -> w0, pause 100 ms (0.50 steps)" in text
    assert "lost samples: 4" in text
    assert "metrics of the last step: accuracy 0.12346, balance 2e-07, nothing not finite, xxx" in text
    assert "\n  most memory: w1 with 3.0 MiB (log 3.0 MiB, optimizer 1.5 KiB)\n" in text
    assert "    | world·[2J" in text
    assert "failed workers: w0, w1, w2, w3, w4 and 2 more" in text
    document = json.loads(to_json(summary, bit_equal=True))
    assert document["takeovers"][0]["pause_steps"] == pytest.approx(0.5)
    assert (document["samples_per_second"], document["bit_equal"], summary.exit_code) == (12.0, True, 0)
    assert document["metrics"] == {"accuracy": 0.123456, "balance": 2e-7, "nothing": None, "x" * 64: 1.0}
    memory = document["memory"]
    assert (memory["worker"], memory["total"], memory["optimizer"]) == ("w1", (3 << 20) + 1536, 1536)
    assert json.loads(to_json(replace(summary, memory=None)))["memory"] is None
    nan = json.loads(to_json(replace(summary, last_loss=float("nan"))))
    assert nan["last_loss"] is None


@pytest.mark.parametrize("outcome", Outcome)
def test_a_run_that_did_not_complete_promises_nothing(outcome: Outcome) -> None:
    """Its weights are nowhere, so all that went into them is lost."""
    finish = Finish(outcome, "Reason", "a sentence")
    summary = summarize("job", STATUS, finish, batch=8, seconds=2.0, output="/out")
    text, document = to_text(summary), json.loads(to_json(summary))
    assert text.startswith(f"job: {outcome}, Reason. a sentence\n")
    if outcome is Outcome.COMPLETE:
        assert document["lost_samples"] == 4
        assert "lost samples: 4\n" in text
        assert "weights, the workers' log and page.html: /out\n" in f"{text}\n"
    else:
        assert document["lost_samples"] == 3 * 8
        assert "lost samples: 24 (all: no weights were saved)" in text
        assert "\n  the workers' log: /out/workers.log" in text
        assert "weights and" not in text


def test_what_a_checkpoint_has_is_not_lost_and_is_not_the_runs_own_work() -> None:
    kept = checkpoints(step=2, age=1.0, restores=1, repeated=3, repeated_seconds=75.0, first=1, place="/kept")
    summary = summarize(
        "job", replace(STATUS, checkpoint=kept), Finish(Outcome.INTERRUPTED, "Reason", "x"), batch=8, seconds=2.0
    )
    text = to_text(summary)
    assert summary.samples_per_second == (3 - 1) * 8 / 2
    assert "3 of 10 steps, from step 1 on, in 2.0 s" in text
    assert "lost samples: 8 (all since the checkpoint of step 2)" in text
    assert "  checkpoint: step 2, in /kept; went back 1 time; 3 steps repeated (1:15)\n" in text
    document = json.loads(to_json(summary))
    assert (document["kept_in"], document["repeated_steps"], document["repeated_seconds"]) == ("/kept", 3, 75.0)


def test_the_live_picture_has_a_line_about_checkpoints() -> None:
    writing = CheckpointWrite(step=4, seconds=1.0, written=3, layers=8)
    kept = checkpoints(step=2, age=65.0, place="s3://bucket/x", writing=writing)
    line = "checkpoint: step 2, 1:05 old, in s3://bucket/x; writing step 4, 3 of 8 layers"
    assert line in drawn(replace(STATUS, checkpoint=kept))
    assert "checkpoint: none yet, in s3://bucket/x" in drawn(
        replace(STATUS, checkpoint=replace(kept, step=None, age=None, writing=None))
    )
    assert "checkpoint" not in drawn(STATUS), "it keeps none"


def test_nothing_to_compare_is_no_equality() -> None:
    assert compare(["a"], ("a",))
    assert not compare([], [])


def test_a_trace_names_its_processes_and_threads(tmp_path: Path) -> None:
    for pid, worker in enumerate(("w0", "w1")):
        trace = TraceFile(tmp_path / f"{worker}.json", worker, pid)
        for step in range(2):
            trace.started("Forward", Cell(pid, 1), step, 0)
            trace.finished("Forward", Cell(pid, 1), step, 0)
        trace.close()
    merge_traces(tmp_path, tmp_path / "out")
    events = json.loads((tmp_path / "out").read_text())["traceEvents"]
    names = [(e["pid"], e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        (0, "process_name", "worker w0"),
        (0, "thread_name", "pipeline 0 stage 1"),
        (1, "process_name", "worker w1"),
        (1, "thread_name", "pipeline 1 stage 1"),
    ]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert [(e["pid"], e["tid"]) in threads for e in events if e["ph"] == "X"] == [True] * 4


def test_traces_are_merged_without_the_torn_line(tmp_path: Path) -> None:
    (tmp_path / "w0.json").write_text('[\n{"name": "a"},\n{"name": "b"},\n{"na')
    (tmp_path / "w1.json").write_text('[\n{"name": "c"}\n]\n')
    target = tmp_path / "out" / "trace"
    target.parent.mkdir()
    merge_traces(tmp_path, target)
    assert [e["name"] for e in json.loads(target.read_text())["traceEvents"]] == ["a", "b", "c"]
