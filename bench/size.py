"""The size of the repository: lines, code lines, files, fields, commands, tests and words, as a Markdown table.

    python bench/size.py [FOLDER ...] [--rooms]

The table has a column for each FOLDER, a checkout (by default this one). To show two states side by side, run `git
worktree add ../before REVISION`, then `python bench/size.py ../before .`. A code line is a line that holds code: no
blank line, no comment, no docstring. The script imports nothing from a checkout.
"""

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

FOLDERS: Final = {
    "core": "core/bamboo_core",
    "client": "client/bamboo",
    "trainer": "trainer/bamboo_trainer",
    "operator": "operator/bamboo_operator",
    "tests": "tests",
    "bench": "bench",
}
PRODUCT: Final = ("core", "client", "trainer", "operator")
WITHOUT_CODE: Final = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
DEFINITIONS: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMMAND: Final = re.compile(r"^### bamboo ", re.MULTILINE)


def sources(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*.py")) if ".venv" not in file.parts)


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the number of each line that a docstring covers."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def code_lines(file: Path) -> int:
    """Count the lines of a Python file that hold code: no blank line, comment or docstring."""
    with file.open("rb") as stream:
        tokens = [token for token in tokenize.tokenize(stream.readline) if token.type not in WITHOUT_CODE]
    found = {line for token in tokens[1:] for line in range(token.start[0], token.end[0] + 1)}
    return len(found - set(docstring_lines(ast.parse(file.read_text()))))


def fields(schema: Mapping[str, Any]) -> int:
    """Return the number of named properties of an OpenAPI schema, including those inside lists and maps."""
    inner = list(schema.get("properties", {}).values())
    below = [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return len(inner) + sum(map(fields, inner + below))


def api_fields(root: Path) -> dict[str, int]:
    """Return the number of fields of spec and status in the newest version of the BambooJob API."""
    versions = yaml.safe_load((root / "crds" / "bamboojob.yaml").read_text())["spec"]["versions"]
    parts = versions[-1]["schema"]["openAPIV3Schema"]["properties"]
    return {f"fields of {part}": fields(parts[part]) for part in ("spec", "status")}


def test_functions(root: Path) -> int:
    trees = (ast.parse(file.read_text()) for file in sources(root / "tests"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(isinstance(node, kinds) and node.name.startswith("test_") for tree in trees for node in ast.walk(tree))


def words(root: Path) -> int:
    """Count the words with a letter or digit in README.md and docs/."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    return sum(any(map(str.isalnum, word)) for page in pages for word in page.read_text().split())


def totals(root: Path) -> dict[str, int]:
    rows: Counter[str] = Counter()
    for name, folder in FOLDERS.items():
        for file in sources(root / folder):
            for counted in ("product", name) if name in PRODUCT else (name,):
                rows[f"{counted}: files"] += 1
                rows[f"{counted}: lines"] += len(file.read_text().splitlines())
                rows[f"{counted}: code lines"] += code_lines(file)
    yamls = (file for folder in ("crds", "charts") for file in (root / folder).rglob("*.yaml") if not file.is_symlink())
    return {
        **rows,
        "crds and charts: lines of YAML": sum(len(file.read_text().splitlines()) for file in yamls),
        **api_fields(root),
        "commands": len(COMMAND.findall((root / "docs" / "cli.md").read_text())),
        "test functions": test_functions(root),
        "words of docs": words(root),
    }


def rooms(root: Path) -> dict[str, int]:
    """Return the code lines of each package of the product."""
    found: defaultdict[str, int] = defaultdict(int)
    for name in PRODUCT:
        for file in sources(root / FOLDERS[name]):
            found[str(file.parent.relative_to(root))] += code_lines(file)
    return dict(found)


def main(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Checkouts to count.")] = None,
    by_room: Annotated[bool, typer.Option("--rooms", help="Count the code lines of each package instead.")] = False,
) -> None:
    roots = folders or [Path(__file__).parent.parent]
    columns = [(rooms if by_room else totals)(root) for root in roots]
    print("| | " + " | ".join(str(root) for root in roots) + " |")
    print("| --- |" + " ---: |" * len(roots))
    for row in dict.fromkeys(key for column in columns for key in column):
        print(f"| {row} | " + " | ".join(f"{column.get(row, 0):,}" for column in columns) + " |")


if __name__ == "__main__":
    typer.run(main)
