"""The page of a report: whole without anything else, and nothing in it is taken for HTML."""

from html.parser import HTMLParser

from bamboo.bench.bench_page import bench_page
from bamboo.bench.tables import tables
from bamboo.profiles.files import read_devices
from bench_kit import WHOLE, report


class Tags(HTMLParser):
    """What is opened and not closed, and what is fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_all_tables_and_needs_nothing_else() -> None:
    found = report(*WHOLE)
    page, tags = bench_page(found, tables(found, read_devices())), Tags()
    tags.feed(page)
    assert (tags.open, tags.fetched) == ([], [])
    assert page.count("<section>") == len(tables(found, read_devices()))
    assert "prefers-color-scheme: dark" in page
    assert 'class="bar" style="--part: 56%"' in page
    assert '<td data-label="bits" class="bad"><span>DIFFERENT</span></td>' in page
    assert "This run is not complete" in page


def test_a_device_with_a_strange_name_does_no_harm() -> None:
    found = report(date="<script>alert(1)</script>", complete=True)
    page = bench_page(found, tables(found, read_devices()))
    assert "<script>" not in page
    assert "not complete" not in page
