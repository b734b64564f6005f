"""The layout of the repository: each package's purpose, tests named after modules, unique class names, formatting."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"core": "bamboo_core", "client": "bamboo", "trainer": "bamboo_trainer", "operator": "bamboo_operator"}

# Tests of what several modules do together, by what they are about; each other one is named after a module.
SCENARIOS = {
    "core": {
        "checkpoint_s3",
        "coordinator_distrust",
        "coordinator_waiting",
        "storage_faults",
    },
    "client": {
        "fuzz",
        "shipped_profiles",
        "spread",
        "zone_costs",
    },
    "trainer": {
        "checkpoint_restore",
        "faults",
        "frozen_layers",
        "fused_optimizers",
        "gpu",
        "history_losses",
        "history_run",
        "boundary_precision",
        "same_bits",
        "model_library",
        "parameter_precision",
        "pretended_gpu",
        "random_jobs",
        "report",
        "silent_corruption",
        "skipped_steps",
        "suspension",
        "transport",
        "unused_parameters",
        "weighted_loss",
        "wire_versions",
        "zero_bubble",
        "zone_traffic_of_engines",
    },
    "operator": {"operator_many", "operator_waiting"},
    "cli": {"cli_docs"},
    "page": {"page_browser"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the distribution and the file of each module of the product, except `__init__` and `__main__`."""
    for distribution, package in PACKAGES.items():
        for file in sorted((ROOT / distribution / package).rglob("*.py")):
            if not file.stem.startswith("__"):
                yield distribution, file


def test_every_room_says_in_one_sentence_what_it_is_for() -> None:
    rooms = {file.parent for _, file in modules()}
    assert {str(room) for room in rooms if not (room / "__init__.py").read_text().startswith('"""')} == set()


def names_of_tests(folder: str) -> set[str]:
    """Return the names that tests of modules may begin with: `module`, `subpackage_module` or `distribution_module`.

    A folder named after a distribution has tests of that distribution's modules; other folders have tests of any.
    """
    found = set()
    for distribution, file in modules():
        if folder in PACKAGES and folder != distribution:
            continue
        rooms = file.relative_to(ROOT / distribution / PACKAGES[distribution]).parts[:-1]
        found |= {file.stem, *(f"{room}_{file.stem}" for room in (distribution, *rooms))}
    return found


@pytest.mark.parametrize("folder", SCENARIOS)
def test_a_test_is_named_after_the_module_that_it_tests(folder: str) -> None:
    tests = {file.stem.removeprefix("test_") for file in (ROOT / "tests" / folder).glob("test_*.py")}
    scenarios, names = SCENARIOS[folder], tuple(f"{name}_" for name in names_of_tests(folder))
    others = {test for test in tests - scenarios if not f"{test}_".startswith(names)}
    assert (others, scenarios - tests) == (set(), set()), "scenarios are listed; others have their module's name"


def test_a_class_name_has_one_meaning() -> None:
    places = Counter(
        node.name
        for _, file in modules()
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in places.items() if count > 1} == {}


def test_nothing_opts_out_of_the_formatter() -> None:
    """Authors split a line that would otherwise need an exception from the formatter."""
    opting_out = [
        str(file.relative_to(ROOT))
        for folder in ("core", "client", "trainer", "operator", "tests", "bench", "dashboards", "docs")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if re.search(r"#\s*fmt:\s*(skip|off)", file.read_text())
    ]
    assert opting_out == []
