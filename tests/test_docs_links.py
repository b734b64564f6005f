"""Links between the pages lead to a file and a heading that are there; commands in them are such that there are."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from bamboo.cli.commands import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMANDS = typer.main.get_command(app)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()


def commands(page: Path) -> Iterator[list[str]]:
    """Calls of `bamboo` in blocks of code and in text, without comments."""
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
