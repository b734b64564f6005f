"""The summary of a finished run as text and JSON."""

import json
from dataclasses import replace

import pytest

from bamboo.local.views.summary import to_json, to_text
from bamboo_core.control.memory import Traffic
from bamboo_core.coordinator.events import Outcome
from operator_kit import checkpoints
from run_view_kit import STATUS, ran


def test_the_summary_as_text_and_json() -> None:
    crashes = tuple(f"w{n} was killed" for n in (10, 3, 2, 0, 1, 4, 12))
    summary = ran(log_tail="hello\nworld\x1b[2J", crashes=crashes)
    text = to_text(summary)
    assert "w1 -> w0, pause 100 ms (0.50 steps)" in text
    assert "samples left out: 4" in text
    assert "metrics of the last step: accuracy 0.12346, balance 2e-07, nothing not finite, xxx" in text
    assert "\n  most memory: w1 with 3.0 MiB of 4.0 MiB at its peak\n" in text
    assert "\n  most sent in a step: w0 with 4.0 MiB (sync 4.0 MiB, activation 1.5 KiB)\n" in text
    assert "    | world·[2J" in text
    assert "failed workers: w0, w1, w2, w3, w4 and 2 more was killed" in text
    document = json.loads(to_json(summary, bit_equal=True))
    assert document["takeovers"][0]["pause_steps"] == pytest.approx(0.5)
    assert (document["samples_per_second"], document["bit_equal"], summary.exit_code) == (12.0, True, 0)
    assert document["metrics"] == {"accuracy": 0.123456, "balance": 2e-7, "nothing": None, "x" * 64: 1.0}
    assert document["grid"] == {"stages": 2, "pipelines": 1}
    assert document["memory"]["w1"] == {"peak": 3 << 20, "limit": 4 << 20}
    assert document["traffic"]["w2"] == {"total": 5, **Traffic(gradient=5).by_kind()}
    nan = json.loads(to_json(ran(replace(STATUS, loss=float("nan")))))
    assert nan["last_loss"] is None


def test_what_no_worker_has_had_is_left_out() -> None:
    """The summary leaves out memory if no worker reported any, and sent bytes if no worker sent any."""
    status = replace(STATUS, memory=(), traffic=(("w0", Traffic()),))
    text = to_text(ran(status, Outcome.FAILED, "TaskFailed"))
    assert "most memory" not in text
    assert "most sent" not in text


def test_a_run_that_an_evaluation_ends_says_how_many_steps_were_wanted() -> None:
    status = replace(STATUS, step=6, stopped_early="2 evaluations without a better loss")
    summary = ran(status, reason="EarlyStopped")
    assert "\n  6 of 10 steps, stopped early, in 2.0 s" in to_text(summary)
    document = json.loads(to_json(summary))
    assert (document["committed"], document["steps"]) == (6, 10)
    assert document["stopped_early"] == "2 evaluations without a better loss"
    assert json.loads(to_json(ran()))["stopped_early"] is None


@pytest.mark.parametrize("outcome", Outcome)
def test_a_run_that_did_not_complete_promises_nothing(outcome: Outcome) -> None:
    """The summary of an incomplete run says how many steps were not kept; their samples do not count as left out."""
    summary = ran(STATUS, outcome, "Reason", output="/out")
    text, document = to_text(summary), json.loads(to_json(summary))
    assert text.startswith(f"job: {outcome}, Reason. a sentence\n")
    assert document["lost_samples"] == 4
    assert "samples left out: 4\n" in text
    if outcome is Outcome.COMPLETE:
        assert "not kept" not in text
        assert "weights, the workers' log and page.html: /out\n" in f"{text}\n"
    else:
        assert "\n  not kept: 3 steps, all of them: the job keeps no checkpoints\n" in text
        assert "\n  the workers' log: /out/workers.log" in text
        assert "weights and" not in text


def test_what_a_checkpoint_has_is_not_lost_and_is_not_the_runs_own_work() -> None:
    kept = checkpoints(step=2, age=1.0, restores=1, repeated=3, repeated_seconds=75.0, first=1, place="/kept")
    summary = ran(replace(STATUS, checkpoint=kept), Outcome.INTERRUPTED, "Reason")
    text = to_text(summary)
    assert summary.samples_per_second == (3 - 1) * 8 / 2
    assert "3 of 10 steps, from step 1 on, in 2.0 s" in text
    assert "\n  not kept: 1 step, all since the checkpoint of step 2\n" in text
    assert "samples left out: 4\n" in text
    assert "  checkpoint: step 2, in /kept; went back 1 time; 3 steps repeated (1:15)\n" in text
    document = json.loads(to_json(summary))
    assert (document["kept_in"], document["repeated_steps"], document["repeated_seconds"]) == ("/kept", 3, 75.0)
