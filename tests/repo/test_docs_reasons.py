"""docs/troubleshooting.md explains each reason in the code once, and no other.

The tests read the code without running it: reasons are strings that calls of TELLERS pass, and keys of DISRUPTIONS.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bamboo_operator.signals.cloud_marks import DISRUPTIONS

ROOT = Path(__file__).parents[2]
PACKAGES = ("core/bamboo_core", "client/bamboo", "trainer/bamboo_trainer", "operator/bamboo_operator")
PAGE = ROOT / "docs" / "troubleshooting.md"
CAMEL = re.compile(r"(?:[A-Z][a-z0-9]*)+")

# Function -> the reason's position among its arguments, and its name as a keyword argument
TELLERS: dict[str, tuple[int, str]] = {
    "Emit": (0, "reason"),
    "ConditionResult": (1, "reason"),
    "Shortfall": (0, "reason"),
    "QueueStanding": (9, "reason"),
    "Protection": (1, "reason"),
    "StartupProblem": (0, "reason"),
    "DisruptionMark": (0, "source"),
    "Signal": (9, "source"),
    "Notice": (9, "source"),
    "Finish": (1, "reason"),
    "finish": (1, "reason"),
    "lost": (1, "reason"),
    "_begin_to_look": (1, "reason"),
    "interrupt": (0, "reason"),
    "next_plan": (2, "reason"),
    "Plan": (9, "reason"),
    "_changed": (9, "reason"),
    "refuse": (1, "reason"),
    "_refuse": (2, "reason"),
    "_dismiss": (2, "reason"),
    "Refused": (9, "reason"),
    "Stop": (9, "reason"),
    "_fail": (0, "reason"),
    "WorkerFailed": (9, "reason"),
    "WorkerWarning": (9, "reason"),
    "Unauthorized": (1, "reason"),
    "_turned_away": (0, "reason"),
}
# These calls have nothing to do with reasons.
OTHERS = {
    ("core/bamboo_core/job/forms.py", "_refuse"),
    ("operator/bamboo_operator/manifests/template.py", "refuse"),
    ("client/bamboo/local/session.py", "finish"),
    ("client/bamboo/local/views/page_view.py", "finish"),
}


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the string constants in a node, except those in comparisons."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in () if isinstance(node, ast.Compare) else ast.iter_child_nodes(node):
        yield from _texts(child)


def _given(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield the texts that a file's calls of TELLERS pass as a reason."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if called in TELLERS and (file, called) not in OTHERS:
                position, name = TELLERS[called]
                for reason in [*(k.value for k in call.keywords if k.arg == name), *call.args[position : position + 1]]:
                    yield from _texts(reason)


@cache
def reasons() -> tuple[set[str], set[str]]:
    """Return the reasons in the code, except "Unknown", and all string constants of the code."""
    given, texts = set(DISRUPTIONS), set[str]()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            given |= set(_given(tree, str(path.relative_to(ROOT))))
            texts |= set(_texts(tree))
    return given - {"Unknown"}, texts


def listed() -> list[str]:
    """Return the texts in backticks in the first column of the page's tables."""
    rows = re.findall(r"^\| (`[^|]+?) \|", PAGE.read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_reasons_are_camel_case() -> None:
    given, _ = reasons()
    assert len(given) > 150
    assert {name for name in given if not CAMEL.fullmatch(name)} == set()


def test_the_page_explains_every_reason_once_and_no_other() -> None:
    given, texts = reasons()
    names = listed()
    assert given - set(names) == set(), "not explained"
    assert set(names) - texts == set(), "nobody gives these"
    assert sorted(names) == sorted(set(names)), "explained twice"
