"""Fixtures for `logger_kit`."""

import pytest

from logger_kit import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)
