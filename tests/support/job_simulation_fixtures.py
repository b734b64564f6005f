"""Fixtures for `job_simulation_kit`."""

from pathlib import Path

import pytest
import yaml

from bamboo_core.planning.profile import to_json
from job_simulation_kit import job


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    one = job(3, None, elastic={"maxWorkers": 6})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(one.manifest))
    (tmp_path / "profile.json").write_bytes(to_json(one.profile))
    return str(tmp_path / "job.yaml"), str(tmp_path / "profile.json")
