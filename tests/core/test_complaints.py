"""What is said of errors: always something."""

import logging
import os

import pytest

from bamboo_core.complaints import SilentErrorsNamed, complain, complaint_of, said_by, system_reason


class Unable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "TimeoutError"),
        (ProcessLookupError(), "ProcessLookupError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("steps: expected a number"), "steps: expected a number"),
        (OSError(28, os.strerror(28), "file"), "[Errno 28] No space left on device: 'file'"),
        (Unable(), "Unable, whose str() raises RuntimeError"),
    ],
)
def test_an_error_is_its_text_or_else_its_type(error: Exception, said: str) -> None:
    assert said_by(error) == said


def test_of_the_systems_errors_the_words_suffice_where_there_are_any() -> None:
    assert system_reason(OSError(28, os.strerror(28), "file")) == "No space left on device"
    assert system_reason(OSError("nothing but text")) == "nothing but text"
    assert system_reason(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize(
    ("what", "doing", "sentence"),
    [
        (TimeoutError(), "while it was closed", "while it was closed: TimeoutError"),
        ("", "", "something went wrong that has no text"),
        ("a sentence", "", "a sentence"),
    ],
)
def test_a_complaint_is_never_empty(
    what: Exception | str, doing: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint_of(what, doing) == sentence
    complain(what, doing)
    assert capsys.readouterr().err == f"bamboo: {sentence}\n"


@pytest.mark.parametrize(
    ("message", "values", "line"),
    [
        ("it failed: %s", (TimeoutError(),), "it failed: TimeoutError"),
        ("it failed: %s after %d", (ValueError("no"), 3), "it failed: no after 3"),
        ("it failed: %r", (ValueError("no"),), "it failed: ValueError('no')"),
        (TimeoutError(), (), "TimeoutError"),
    ],
)
def test_a_log_says_what_errors_without_text_are(message: object, values: tuple[object, ...], line: str) -> None:
    record = logging.LogRecord("bamboo", logging.ERROR, "file.py", 1, message, values, None)
    assert SilentErrorsNamed().filter(record)
    assert record.getMessage() == line
