"""Each record of a coordinator's state is made in its own room alone: by its class, or where something is decided.

Others call the class's methods, and `Turn.put` has the value's place. So another room would have to make a record
itself, or to replace fields of one. What lies in no room is a room of its own.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.state import CoordinatorState, Record

ROOT = Path(__file__).parents[2]
COORDINATOR = Path(coordinator.__file__).parent
PRODUCT = [ROOT / "core", ROOT / "client", ROOT / "operator", ROOT / "trainer"]
RECORDS = get_args(Record)
FIRST_VALUES = ("bamboo_core.coordinator.coordinator", "initial")  # of some records, before the first event
UNNAMED = "a name that is not written there"
PLACES = {one.name for one in dataclasses.fields(CoordinatorState)}


def room_of(module: str) -> str:
    package, _, _ = module.rpartition(".")
    return module if package == "bamboo_core.coordinator" else package


HOMES = {kind.__name__: room_of(kind.__module__) for kind in RECORDS}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts[1:])


def calls(node: ast.AST, place: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Each call, with the function that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield place, child
        yield from calls(child, child.name if isinstance(child, ast.FunctionDef) else place)


def fields_of(module: str) -> dict[str, set[str]]:
    """The fields of each record that is another room's; a mapping of workers has none."""
    others = [kind for kind in RECORDS if HOMES[kind.__name__] != room_of(module) and dataclasses.is_dataclass(kind)]
    return {kind.__name__: {one.name for one in dataclasses.fields(kind)} for kind in others}


def written(module: str, tree: ast.Module) -> set[str]:
    """The records of other rooms that a module makes, by constructor or by `replace` with their fields."""
    found = set()
    for place, call in calls(tree):
        name = ast.unparse(call.func).split(".")[-1]
        if name in HOMES and HOMES[name] != room_of(module) and (module, place) != FIRST_VALUES:
            found.add(name)
        if name != "replace" or not call.args or ast.unparse(call.func).startswith("msgspec"):
            continue
        value, names = ast.unparse(call.args[0]), {one.arg or UNNAMED for one in call.keywords}
        if value == "self":
            continue  # in a method, of a value of its own class
        found |= {record for record, fields in fields_of(module).items() if names <= fields}
        found |= {"CoordinatorState"} if names <= PLACES and module != "bamboo_core.coordinator.state" else set()
        found |= {UNNAMED} if UNNAMED in names and module != "bamboo_core.coordinator.state" else set()
    return found


def test_each_record_is_made_in_its_own_room_alone() -> None:
    files = COORDINATOR.rglob("*.py")
    found = {module_of(file): written(module_of(file), ast.parse(file.read_text())) for file in files}
    assert {module: records for module, records in found.items() if records} == {}


def test_no_shell_writes_into_a_state() -> None:
    """The operator and local runs hand events over, and take a state as it is."""
    shells = [file for root in PRODUCT for file in root.rglob("*.py") if COORDINATOR not in file.parents]
    knowing = [file for file in shells if "bamboo_core.coordinator" in file.read_text()]
    assert len(knowing) > 20
    made = {
        module_of(file): {ast.unparse(call) for _, call in calls(ast.parse(file.read_text())) if writes_state(call)}
        for file in knowing
    }
    assert {module: text for module, text in made.items() if text} == {}


def writes_state(call: ast.Call) -> bool:
    is_replace = ast.unparse(call.func).split(".")[-1] == "replace" and call.args
    return bool(is_replace and ast.unparse(call.args[0]).split(".")[-1] in {"state", "_state", *PLACES})


@pytest.mark.parametrize(
    ("line", "record"),
    [
        ("turn.put(replace(turn.state.progress, step=7))", "Progress"),
        ("known = turn.state.progress; turn.put(dataclasses.replace(known, step=7, trained=3))", "Progress"),
        ("turn.put(Progress(step=7))", "Progress"),
        ("return replace(state, progress=state.progress)", "CoordinatorState"),
        ("turn.put(replace(turn.state.splits, **changes))", UNNAMED),
        ("turn.put(Workers({}))", "Workers"),
    ],
)
def test_a_second_writer_is_found(line: str, record: str) -> None:
    tree = ast.parse(f"def change(turn):\n    {line}\n")
    assert record in written("bamboo_core.coordinator.second", tree)
    assert record not in written(HOMES.get(record, "bamboo_core.coordinator.state"), tree)


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
