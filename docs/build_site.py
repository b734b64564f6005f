"""Build the documentation site from the Markdown files of the repository.

`python docs/build_site.py FOLDER` replaces FOLDER with the site. It has the pages of docs/, in the order of mkdocs.yml.
A linked file or folder outside docs/ becomes a page, too: Markdown with its links changed, a source file as a block of
code, a folder as a list of its files. So the site needs no address of a repository, and it loads nothing from another
host. The generated references are complete on the site; the committed pages are short.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

import yaml

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
GENERATED = {
    "api.md": "generate_api.py",
    "cli.md": "generate_cli.py",
    "python-api.md": "generate_python_api.py",
    "metrics.md": "generate_metrics.py",
}
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def sources() -> list[Path]:
    """Return the files of docs/ that the site shows: all but the Python programs."""
    return [path for path in sorted((ROOT / "docs").rglob("*")) if path.is_file() and path.suffix[:3] != ".py"]


def place(source: Path) -> PurePosixPath:
    """Map a file or folder of the repository to the path, below the staged docs/, of its page or copy."""
    path = PurePosixPath(source.relative_to(ROOT).as_posix())
    if path.parts[0] == "docs":
        return PurePosixPath(*path.parts[1:])
    if path.suffix == ".md":
        return PurePosixPath("repository", path.name.lower() if path.stem != "README" else "overview.md")
    return PurePosixPath("repository", f"{path}.md")


class Staging:
    """The folder of pages that the site generator reads. Files outside docs/ are added when a page links to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: set[Path] = set()

    def add(self, source: Path) -> None:
        if source in self._done:
            return
        self._done.add(source)
        target = self._folder / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.write_text(self._listing(source))
        elif source.suffix == ".md":
            target.write_text(self._page(source))
        elif target.suffix == ".md":
            target.write_text(_code_page(source))
        else:
            shutil.copyfile(source, target)

    def _page(self, source: Path) -> str:
        """Return a page's Markdown with its links changed to paths of the site, and add the pages that it links to."""
        parts = CODE.split(_text(source))
        return "".join(
            part if CODE.fullmatch(part) else LINK.sub(lambda m: self._link(source, m[1]), part) for part in parts
        )

    def _link(self, page: Path, link: str) -> str:
        if "://" in link or link.startswith("mailto:"):
            return link
        target = (page.parent / link).resolve()
        if not target.exists():
            raise SystemExit(f"{page.relative_to(ROOT)}: {link} is not there")
        if target.is_dir() and target.is_relative_to(ROOT / "docs"):
            raise SystemExit(f"{page.relative_to(ROOT)}: {link} is a folder of docs; link to a page")
        self.add(target)
        return os.path.relpath(place(target), place(page).parent)

    def _listing(self, folder: Path) -> str:
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        for path in files:
            self.add(path)
        links = [f"- [{path.name}]({os.path.relpath(place(path), place(folder).parent)})" for path in files]
        return "\n".join([f"# {folder.relative_to(ROOT)}", "", *links, ""])


def _text(source: Path) -> str:
    """Return a page's Markdown; for a generated reference, the complete version."""
    if source.parent == ROOT / "docs" and source.name in GENERATED:
        generator = runpy.run_path(str(ROOT / "docs" / GENERATED[source.name]))
        if source.name == "api.md":
            return str(generator["page"](yaml.safe_load(generator["CRD"].read_text()), whole=True))
        given = (source.read_text(),) if source.name == "metrics.md" else ()
        return str(generator["page"](*given, whole=True))
    return source.read_text()


def _code_page(source: Path) -> str:
    language = {".py": "python", ".yaml": "yaml", ".json": "json"}.get(source.suffix, "text")
    return f"# {source.relative_to(ROOT)}\n\n~~~~~~{language}\n{source.read_text().rstrip()}\n~~~~~~\n"


def build(output: Path) -> None:
    """Build the site, and replace the output folder with it. Raises SystemExit if a link is wrong or Zensical fails."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
        staging = Staging(folder / "docs")
        for source in sources():
            staging.add(source)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
            raise SystemExit(said.partition("Traceback")[0].rstrip())
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(folder / "site", output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds the documentation site.")
    parser.add_argument("folder", type=Path, help="where the site is written; what is there is replaced")
    build(parser.parse_args().folder)
