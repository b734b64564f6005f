"""docs/troubleshooting.md explains every reason that the code can give, and none that it cannot.

The code is read, not run: in each call that tells of a reason the argument is followed to the texts that it can be. One
that leads nowhere has to be named in PASSED_ON, with the place where its values come from.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("core/bamboo_core", "client/bamboo", "trainer/bamboo_trainer", "operator/bamboo_operator")
PAGE = ROOT / "docs" / "troubleshooting.md"
CAMEL = re.compile(r"(?:[A-Z][a-z0-9]*)+")

# The function called -> where the reason is among its arguments: position, or name if it is given so
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
    "Refused": (9, "reason"),
    "Stop": (9, "reason"),
    "_fail": (0, "reason"),
    "WorkerFailed": (9, "reason"),
    "Unauthorized": (1, "reason"),
    "_turned_away": (0, "reason"),
}
# Tables whose keys or values are reasons, by file
TABLES = {
    "operator/bamboo_operator/signals/cloud_marks.py": {"DISRUPTIONS": "keys"},
    "operator/bamboo_operator/pods/starting/startup_problems.py": {"_WAITING": "values"},
    "operator/bamboo_operator/pods/starting/startup_events.py": {"_CAUSES": "values"},
}
# Functions whose results are reasons
ANSWERS = {
    "operator/bamboo_operator/signals/signals.py": ("_exit_source", "_disruption"),
    "trainer/bamboo_trainer/worker/failure_reasons.py": ("failure_reason",),
}
# What is told under a name that holds a reason made elsewhere -> where
PASSED_ON = {
    "reason": "an argument of Turn.finish, Turn.refuse, Channels._refuse, Worker._fail, or a field that is passed on",
    "plan.reason": "next_plan, and the first plan's",
    "message.reason": "the worker's own, WorkerFailed",
    "back.reason": "restoring.lost",
    "stopping.reason": "checkpoints.stop, which is given Interrupted's",
    "signal.source": "signals and cloud_marks",
    "of_node.source": "the same",
    "mark.source": "the same",
    "said.reason": "node_marks: an installation's own file",
    "disruption": "ANSWERS and TABLES",
    "_WAITING[reason]": "TABLES",
    "found.reason": "Protection",
    "found[0].reason": "Shortfall",
    "short.reason": "Shortfall",
    "problem.reason": "StartupProblem",
    "problems[0].reason": "StartupProblem",
    "finish.reason": "Finish",
    "queue.reason": "QueueStanding",
    "standing.reason": "QueueStanding",
    "given.facts.queue.reason": "QueueStanding",
    "c.reason or 'Unknown'": "a condition as it was written",
    "_exit_source(pod, code)": "ANSWERS",
    "failure_reason(error)": "ANSWERS",
    "f'Azure{first.event_type}'": "metadata.AZURE_SECONDS: the same as in cloud_marks",
}
# These calls have nothing to do with reasons.
OTHERS = {
    ("core/bamboo_core/job/forms.py", "_refuse"),
    ("operator/bamboo_operator/manifests/template.py", "refuse"),
    ("client/bamboo/local/session.py", "finish"),
    ("client/bamboo/local/views/page_view.py", "finish"),
}


def texts(node: ast.expr, scope: ast.AST, module: ast.Module) -> set[str] | None:
    """Every text that the expression can be; None if that can't be seen."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=one, orelse=other):
            found = [texts(part, scope, module) for part in (one, other)]
            return None if None in found else set().union(*[f for f in found if f])
        case ast.Name(id=name):
            for place in (scope, module):
                values = [value for value in _assigned(place, name) if texts(value, scope, module) is not None]
                if values:
                    return set().union(*[texts(value, scope, module) or set() for value in values])
    return None


def _assigned(place: ast.AST, name: str) -> Iterator[ast.expr]:
    nodes = place.body if isinstance(place, ast.Module) else ast.walk(place)
    for node in nodes:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            for package in PACKAGES:
                source = (ROOT / package).parent / (node.module.replace(".", "/") + ".py")
                if source.is_file():
                    yield from _assigned(ast.parse(source.read_text()), name)


def _reason(call: ast.Call) -> ast.expr | None:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called not in TELLERS:
        return None
    position, name = TELLERS[called]
    named = next((k.value for k in call.keywords if k.arg == name), None)
    return named or (call.args[position] if position < len(call.args) else None)


def told_in(path: Path) -> tuple[set[str], set[str]]:
    """The reasons of one file, and the expressions that lead nowhere."""
    module, file = ast.parse(path.read_text()), str(path.relative_to(ROOT))
    found: set[str] = set()
    unclear: set[str] = set()
    functions = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    scopes: list[ast.AST] = [module, *functions]
    inner = {id(n) for f in functions for n in ast.walk(f) if n is not f}
    for scope in scopes:
        for call in ast.walk(scope):
            if not isinstance(call, ast.Call) or (scope is module and id(call) in inner):
                continue
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if (file, called) in OTHERS or (reason := _reason(call)) is None:
                continue
            values = texts(reason, scope, module)
            if values is None:
                unclear.add(ast.unparse(reason))
            else:
                found |= values
    return found | _tables(module, file) | _answers(functions, file) | _counted(module), unclear


def _tables(module: ast.Module, file: str) -> set[str]:
    found: set[str] = set()
    for name, part in TABLES.get(file, {}).items():
        tables = [n.value for n in module.body if isinstance(n, ast.AnnAssign | ast.Assign) and _is(n, name)]
        assert len(tables) == 1, f"{file}: {name} is not there any more"
        table = tables[0]
        assert isinstance(table, ast.Dict)
        for node in table.keys if part == "keys" else table.values:
            found |= texts(node, module, module) or set() if node else set()
    return found


def _is(node: ast.AnnAssign | ast.Assign, name: str) -> bool:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


def _answers(functions: list[ast.FunctionDef | ast.AsyncFunctionDef], file: str) -> set[str]:
    """What these functions can return, or fall back on, in CamelCase."""
    found: set[str] = set()
    for name in ANSWERS.get(file, ()):
        function = next(f for f in functions if f.name == name)
        module = ast.parse((ROOT / file).read_text())
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                for part in _outcomes(node.value):
                    found |= texts(part, module, module) or set()
    return found


def _outcomes(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.IfExp(body=one, orelse=other):
            yield from _outcomes(one)
            yield from _outcomes(other)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _outcomes(value)
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            yield from _outcomes(inner)
        case _:
            yield node


def _counted(module: ast.Module) -> set[str]:
    """Keys of `refusals[...]`, the counter of callers that were sent away."""
    return {
        node.slice.value
        for node in ast.walk(module)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "refusals"
        and isinstance(node.slice, ast.Constant)
    }


@cache
def reasons() -> tuple[set[str], dict[str, set[str]]]:
    found: set[str] = set()
    unclear: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            values, others = told_in(path)
            found |= values
            if others - PASSED_ON.keys():
                unclear[str(path.relative_to(ROOT))] = others - PASSED_ON.keys()
    return found, unclear


def listed() -> list[str]:
    """The first cells of the page's tables."""
    rows = re.findall(r"^\| (`[^|]+?) \|", PAGE.read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_every_reason_can_be_followed_to_its_text() -> None:
    _, unclear = reasons()
    assert unclear == {}, "say in PASSED_ON where these come from"


def test_reasons_are_camel_case() -> None:
    found, _ = reasons()
    assert len(found) > 90
    assert {name for name in found if not CAMEL.fullmatch(name)} == set()


def test_the_page_explains_every_reason_once_and_no_other() -> None:
    found, _ = reasons()
    names = listed()
    assert found - set(names) == set(), "not explained"
    assert set(names) - found == set(), "nobody gives these"
    assert sorted(names) == sorted(set(names)), "explained twice"
