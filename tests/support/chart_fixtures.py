"""pytest plugin: Helm, and the chart as it renders. Put pytest_plugins = ["chart_fixtures"] into a test module."""

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
    """What each of the SETS gives."""
    return {name: chart.template(values, apis=FOREIGN) for name, values in SETS.items()}
