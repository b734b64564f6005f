"""Error messages, which are never empty."""

import os

import pytest

from bamboo_core.complaints import complain, complaint_of, said_by


class Unable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TimeoutError(), "TimeoutError"),
        (ProcessLookupError(), "ProcessLookupError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("steps: expected a number"), "steps: expected a number"),
        (OSError(28, os.strerror(28), "file"), "[Errno 28] No space left on device: 'file'"),
        (Unable(), "Unable, whose str() raises RuntimeError"),
    ],
)
def test_an_error_is_its_text_or_else_its_type(error: Exception, message: str) -> None:
    assert said_by(error) == message


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
