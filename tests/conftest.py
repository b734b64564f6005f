"""Settings of every test: one compute thread, as in a worker; no test case fails for being slow.

Property tests try the same examples whenever the same tests run on the same code, and new ones with
--hypothesis-profile=random, as `make soak` does.

With pytest-xdist (`make test` runs two processes) a file's tests stay in one process, for they share what is costly to
make; so do all tests with the cluster, which mostly wait for it while the other process computes.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
for name, same in (("bamboo", True), ("random", False)):
    settings.register_profile(name, derandomize=same, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bamboo")

# What takes longest comes first, so that no process is left with a long file at the end.
FIRST = ("cluster", "test_engine", "test_faults", "test_protocol_simulation", "test_operator_simulation")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: FIRST.index(groups[item]) if groups[item] in FIRST else len(FIRST))


def _group(item: pytest.Item) -> str:
    """Of tests that run one after the other in the same process."""
    if item.get_closest_marker("cluster") or "cluster" in getattr(item, "fixturenames", ()):
        return "cluster"
    return Path(item.path).stem
