"""Checks that the docs' index names every page, and that commands and code in pages exist. Links: `test_site.py`."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from bamboo.cli.commands import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMANDS = typer.main.get_command(app)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    found = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "design").glob("*.md")]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in found} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words after `bamboo` of each command in a page's code blocks and inline code, without comments."""
    text = page.read_text()
    lines = [line for block in CODE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for call in [*lines, *re.findall(r"`([^`\n]+)`", CODE.sub("", text))]:
        if match := re.search(r"(?:^|/bin/|&& |kubectl )bamboo ((?:[a-z]+|--help|--version)(?: .*|$))", call.strip()):
            words = shlex.split(match[1].replace("'", ""), comments=True)
            yield [word.strip("[]") for word in words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_that_there_is(page: Path) -> None:
    assert isinstance(COMMANDS, typer.core.TyperGroup)
    wrong = []
    for words in commands(page):
        group, found = COMMANDS, None
        while words and isinstance(group, typer.core.TyperGroup) and (found := group.commands.get(words[0])):
            group, words = found, words[1:]  # type: ignore[assignment]
        if found is None:
            wrong += [words] if words[0] not in ("--help", "--version") else []
            continue
        known = {"-h", "--help"} | {o for p in found.params for o in (*p.opts, *p.secondary_opts)}
        wrong += [
            [found.name, word] for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known
        ]
    assert wrong == []


FILE = re.compile(r"(?:bamboo|bamboo_core|bamboo_trainer|bamboo_operator|tests)/[\w/]+\.py")
FUNCTION = re.compile(r"([A-Za-z_][\w.]*)\(\)")
PARENTS = {"bamboo_core": "core", "bamboo": "client", "bamboo_trainer": "trainer", "bamboo_operator": "operator"}


def named_code(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, "") for each file that a page names, and (file, name) for each `name()` after it in its line."""
    for line in page.read_text().splitlines():
        file: Path | None = None
        for span in re.findall(r"`([^`]+)`", line):
            if FILE.fullmatch(span):
                file = ROOT / PARENTS.get(span.partition("/")[0], "") / span
                yield file, ""
            elif file is not None and (function := FUNCTION.fullmatch(span)):
                yield file, function[1]


def defined_in(file: Path) -> set[str]:
    """Return the names of a file's functions, and of methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


NAMING = [ROOT / "docs" / "where.md", ROOT / "CONTRIBUTING.md", ROOT / "JOURNEYS.md"]


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_files_and_functions_that_a_page_names_are_there(page: Path) -> None:
    named = list(named_code(page))
    assert named
    gone = [(str(file.relative_to(ROOT)), name) for file, name in named if not file.is_file()]
    gone += [
        (str(file.relative_to(ROOT)), name)
        for file, name in named
        if file.is_file() and name and name not in defined_in(file)
    ]
    assert gone == []


MODULE = re.compile(r"[a-z_]+/[a-z_]+")


def test_modules_that_the_design_names_are_there() -> None:
    text = "".join(CODE.sub("", page.read_text()) for page in (ROOT / "docs" / "design").glob("*.md"))
    named = {span for span in re.findall(r"`([^`\n]+)`", text) if MODULE.fullmatch(span)}
    assert len(named) > 20
    packages = [ROOT / folder / package for package, folder in PARENTS.items()]
    assert {name for name in named if not any((package / f"{name}.py").is_file() for package in packages)} == set()
