"""How large and how tangled the code is: lines, functions, writers of the coordinator's fields, words, time to start.

    python bench/house.py [FOLDER ...] [--json FILE]

A column for each FOLDER, a checkout with its own environment in .venv; this one if none is named. So two states of the
repository stand side by side: `git worktree add ../before REVISION`, then `python bench/house.py ../before .`.
"""

import ast
import re
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from _common import show, write_json

PRODUCT: Final = {
    "core": "core/bamboo_core",
    "client": "client/bamboo",
    "trainer": "trainer/bamboo_trainer",
    "operator": "operator/bamboo_operator",
}
SMALL: Final = 30  # lines
STARTS: Final = 7  # of the command line, of which the median counts
OPTED_OUT: Final = re.compile(r"#\s*fmt:\s*(skip|off)")
GENERATED: Final = {"api.md", "cli.md", "metrics.md", "python-api.md"}  # of docs/


def sources(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*.py")) if ".venv" not in file.parts)


def lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in sources(folder))


def rooms(root: Path) -> dict[str, int]:
    """The lines of each package of the product, by its dotted name."""
    found: defaultdict[str, int] = defaultdict(int)
    for package in PRODUCT.values():
        for file in sources(root / package):
            found[".".join(file.parent.relative_to((root / package).parent).parts)] += len(
                file.read_text().splitlines()
            )
    return dict(found)


def functions(root: Path) -> list[int]:
    """The lines of each function of the product, its docstring counted."""
    trees = (ast.parse(file.read_text()) for package in PRODUCT.values() for file in sources(root / package))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def writers(root: Path) -> dict[str, set[str]]:
    """Which modules of the coordinator make a new value of a field, by the names that they give when they do so.

    These are the keyword arguments of `replace`, and of the methods `set` and `worker`, where there are such.
    """
    folder, found = root / PRODUCT["core"] / "coordinator", defaultdict[str, set[str]](set)
    for file in sources(folder):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                if name in ("replace", "set", "worker"):
                    for keyword in node.keywords:
                        found[keyword.arg or "**"].add(str(file.relative_to(folder)))
    return found


def words(folder: Path, *, generated: bool = False) -> int:
    """The words of the pages that people write, or of all pages."""
    pages = [page for page in sorted(folder.rglob("*.md")) if generated or page.name not in GENERATED]
    return sum(len(page.read_text().split()) for page in pages)


def seconds_to_start(root: Path) -> float:
    """The median of what `bamboo --help` takes."""
    command, taken = [str(root / ".venv/bin/bamboo"), "--help"], []
    for _ in range(STARTS):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def figures(root: Path) -> dict[str, float]:
    """What is shown of a checkout, by what it is called."""
    lengths, written = functions(root), writers(root)
    modules = [file for package in PRODUCT.values() for file in sources(root / package) if file.stem != "__init__"]
    parts = (*PRODUCT, "tests", "bench")
    everything = [file for part in parts for file in sources(root / part)]
    docstrings = "".join(file.read_text() for file in modules)
    return {
        **{f"lines of {name}": lines(root / package) for name, package in PRODUCT.items()},
        "lines of tests": lines(root / "tests"),
        "lines of bench": lines(root / "bench"),
        "rooms": len(rooms(root)),
        f"modules below {SMALL} lines": sum(len(file.read_text().splitlines()) < SMALL for file in modules),
        "functions": len(lengths),
        "function, median lines": statistics.median(lengths),
        "function, 95th percentile lines": lengths[int(0.95 * len(lengths))],
        "fields that the coordinator writes": len(written),
        "of these by two modules or more": sum(len(where) > 1 for where in written.values()),
        "lines that opt out of the formatter": sum(len(OPTED_OUT.findall(file.read_text())) for file in everything),
        "docstrings that begin with Of or The same": len(re.findall(r'"""(Of|The same)\b', docstrings)),
        "words in docs, written": words(root / "docs"),
        "words in docs, all": words(root / "docs", generated=True),
        "bamboo --help, seconds": round(seconds_to_start(root), 2),
    }


def main(
    folders: Annotated[list[Path] | None, typer.Argument(help="Checkouts, each with its .venv.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures, and the rooms' lines, there.")] = None,
) -> None:
    roots = [folder.resolve() for folder in folders or [Path(__file__).parents[1]]]
    found = {root.name: figures(root) for root in roots}
    names = [root.name for root in roots]
    rows = [[what, *(f"{found[name][what]:,}" for name in names)] for what in found[names[0]]]
    show("the house", ["", *names], rows)
    write_json(json, {root.name: {**found[root.name], "rooms": rooms(root)} for root in roots})


if __name__ == "__main__":
    typer.run(main)
