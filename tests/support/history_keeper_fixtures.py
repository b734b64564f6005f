"""Fixtures for `history_keeper_kit`."""

import pytest

from history_keeper_kit import Job


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    job.join("a", "b")
    job.lead("a", 1)
    yield job
    job.close()
