"""Keys that a person presses while a run is shown."""

import pytest

from bamboo.terminal.keys import HELP, Keys, letter, worker_of
from bamboo.terminal.picture import Footer
from bamboo.terminal.view import StopJob, TakeWorker
from run_view_kit import STATUS, drawn


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
