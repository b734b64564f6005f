"""The documentation site is built from docs/, shows every page, and needs no other host."""

import importlib.util
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}


class Page(HTMLParser):
    """An HTML parser, which collects in `loaded` the addresses that a browser loads for a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded |= {value for name, value in attrs if value is not None and (tag, name) in LOADED}


@pytest.fixture(name="builder")
def loaded_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_is_whole_and_loads_nothing_from_another_host(builder: ModuleType, tmp_path: Path) -> None:
    builder.build(tmp_path / "site")
    pages = {path: Page(path.read_text()) for path in (tmp_path / "site").rglob("*.html")}
    for source in (ROOT / "docs").rglob("*.md"):
        html = source.relative_to(ROOT / "docs").with_suffix(".html")
        assert tmp_path / "site" / ("index.html" if html.name == "README.html" else html) in pages
    assert not [path for path in (tmp_path / "site").rglob("*") if path.suffix in (".py", ".pyc")]

    from_elsewhere = {
        (path.name, link) for path, page in pages.items() for link in page.loaded if urlsplit(link).netloc
    }
    assert from_elsewhere == set()
    raw = {path.name for path in pages if "| --- |" in path.read_text()}
    assert raw == set(), "a table that is shown as text"
    assert "PlannedTakeover" in (tmp_path / "site" / "search.json").read_text()


def titles_and_pages(nav: object) -> list[str]:
    match nav:
        case str(page):
            return [page]
        case dict():
            return [page for part in nav.values() for page in titles_and_pages(part)]
        case list():
            return [page for part in nav for page in titles_and_pages(part)]
    raise AssertionError(nav)


def test_the_navigation_names_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]
    named = [page for page in titles_and_pages(nav) if not page.startswith("repository/")]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("other.md#nothing", "anchor does not exist"),
        ("gone.md", "docs/README.md: gone.md is not there"),
        ("folder", "docs/README.md: folder is a folder of docs; link to a page"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, said: str
) -> None:
    (tmp_path / "docs" / "folder").mkdir(parents=True)
    (tmp_path / "docs" / "README.md").write_text(f"# Start\n\nA [link]({link}).\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().partition("nav:\n")[0])
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=said):
        builder.build(tmp_path / "site")
    assert not (tmp_path / "site").exists()
