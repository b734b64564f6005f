"""The journeys of tests/journeys/journeys.md: as they are recorded now, and short."""

import shutil
import subprocess

import pytest

import pretended_gpu
from generate_journeys import PAGE, page, recorded
from journey import Recorded

MOST_HOPS = 25
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(pretended_gpu.COMPILER) is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module")
def journeys() -> list[Recorded]:
    try:
        return recorded()
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr.decode()[-5000:])


def test_the_page_has_the_journeys_as_they_are(journeys: list[Recorded]) -> None:
    text = PAGE.read_text()
    assert page(text, journeys) == text, "make docs writes them anew"


def test_no_journey_is_long(journeys: list[Recorded]) -> None:
    assert {one.title: len(one.hops) for one in journeys if len(one.hops) > MOST_HOPS} == {}
