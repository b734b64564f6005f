"""Checks, beyond the import contracts, that only a coordinator's turns change its state."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.state import CoordinatorState, Record

ROOT = Path(__file__).parents[2]
COORDINATOR = Path(coordinator.__file__).parent
PRODUCT = [ROOT / "core", ROOT / "client", ROOT / "operator", ROOT / "trainer"]
RECORDS = get_args(Record)
PLACES = {one.name for one in dataclasses.fields(CoordinatorState)}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts[1:])


def test_no_shell_writes_into_a_state() -> None:
    """The operator and local runs send events to the coordinator, and only read its state."""
    shells = [file for root in PRODUCT for file in root.rglob("*.py") if COORDINATOR not in file.parents]
    knowing = [file for file in shells if "bamboo_core.coordinator" in file.read_text()]
    assert len(knowing) > 20
    made = {
        module_of(file): {ast.unparse(one) for one in ast.walk(ast.parse(file.read_text())) if writes_state(one)}
        for file in knowing
    }
    assert {module: text for module, text in made.items() if text} == {}


def writes_state(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] == "replace"):
        return False
    return ast.unparse(node.args[0]).split(".")[-1] in {"state", "_state", *PLACES}


def assigned(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets):
                yield from (one for target in targets for one in ast.walk(target) if isinstance(one, ast.expr))
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                yield target


def test_a_state_is_assigned_by_a_turn_alone() -> None:
    for file in {*COORDINATOR.rglob("*.py")} - {COORDINATOR / "state.py"}:
        targets = [one for one in assigned(ast.parse(file.read_text())) if isinstance(one, ast.Attribute)]
        assert not [one for one in targets if one.attr == "state"], file


def test_nothing_gets_round_what_is_frozen() -> None:
    assert all(kind.__dataclass_params__.frozen for kind in RECORDS if dataclasses.is_dataclass(kind))
    for file in {*COORDINATOR.rglob("*.py")} - {COORDINATOR / "replacing.py"}:
        ways = ("__dict__", "__setattr__", "__new__", "copy.copy", "setattr(")
        assert not [way for way in ways if way in file.read_text()], file
