"""Settings of all tests: one compute thread, as in a worker, and no time limit for a Hypothesis example.

Property tests try the same examples whenever the same tests run on the same code, and new ones with
--hypothesis-profile=random, as `make soak` does.

With pytest-xdist (`make test` runs four processes), the tests of a file run in one process, since they share results
that are costly to make. So do all tests with a cluster, which mostly wait for it while other processes compute, all
tests that import transformers, and all tests that import torch's compiler.
"""

import gc
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from warm_processes import PLACE, WarmProcesses

gc.disable()  # until all is collected: what is imported meanwhile stays
gc.set_threshold(20_000, 10, 10)  # not at every 700th object: a tenth of the tests' time
for name, same in (("bamboo", True), ("random", False)):
    settings.register_profile(name, derandomize=same, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bamboo")

ROOT = Path(__file__).parent.parent
# What takes longest comes first, so that no process is left with a long file at the end.
FIRST = (
    "cluster",
    "transformers",
    "test_protocol_simulation",
    "test_engine",
    "compiled",
    "test_operator_simulation",
    "test_local_job",
    "test_faults",
    "test_cli_commands",
    "test_pretended_gpu",
    "test_operator_away",
    "test_fork_server",
    "test_history_run",
    "test_examples",
    "test_transport",
)
# Files with the same word of these are a group: they start the cluster, or import torch's compiler or transformers.
TOGETHER = {"cluster_kit": "cluster", "transformers": "transformers", "compiled_fixtures": "compiled"}
# Kits have asserts and fixtures: tests import them, and name those with fixtures as plugins.
pytest.register_assert_rewrite("operator_process", *(kit.stem for kit in (ROOT / "tests/support").glob("*_kit.py")))
WARM = pytest.StashKey[WarmProcesses]()


def pytest_configure(config: pytest.Config) -> None:
    """Use one compute thread. In pytest-xdist's main process, which runs no tests, start warm processes instead."""
    if config.getoption("numprocesses", None):
        config.stash[WARM] = WarmProcesses()
    else:
        import torch

        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (warm := config.stash.get(WARM, None)) is not None:
        warm.close()


@pytest.fixture
def cold_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's jobs start new processes instead of warm ones, because the test inspects or kills them."""
    monkeypatch.delenv(PLACE, raising=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(group(item.nodeid), len(FIRST)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude all objects made so far from Python's garbage collection, and enable it."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Run the test. After a file's last test, exclude the remaining objects from Python's garbage collection."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_is_here()
    return done


def _keep_what_is_here() -> None:
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Groups(config, log)


class Groups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """Return the name of a test's group. Tests of a group run one after the other in the same process."""
    return _group_of(nodeid.partition("::")[0])


@cache
def _group_of(file: str) -> str:
    text = (ROOT / file).read_text()
    return next((name for word, name in TOGETHER.items() if word in text), Path(file).stem)
