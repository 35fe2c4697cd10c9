"""Does a report stand alone, and is text only ever text?"""

from __future__ import annotations

import re
from html.parser import HTMLParser

from router.report.page import Section, page, paragraph, table, warning

TEXT = "<script>alert('x')</script> & more"


class Tags(HTMLParser):
    """Every tag of a document, in order, and whether all were closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole() -> str:
    return page(TEXT, [Section(TEXT, [paragraph(TEXT), warning(TEXT), table([TEXT, "p50"], [[TEXT, "1"]])])])


def test_text_is_escaped_wherever_it_stands() -> None:
    """Policy names, errors and titles come from files and from the network."""
    tags = Tags(whole())
    assert "script" not in tags.seen
    assert whole().count("&lt;script&gt;") == 7
    assert tags.open == []


def test_a_page_needs_nothing_from_elsewhere() -> None:
    """It can be mailed, and opened on a train."""
    assert not re.search(r"""(src|href)=|@import|url\(""", whole())


def test_a_page_follows_the_readers_light_or_dark() -> None:
    """By the system's setting, without a script."""
    assert "prefers-color-scheme: dark" in whole()


def test_sections_and_blocks_stand_in_the_order_given() -> None:
    """A report is read from the top."""
    document = page("t", [Section("first", ["<p>one</p>", "<p>two</p>"]), Section("second", [])])
    places = [document.index(part) for part in ("<h2>first", "one", "two", "<h2>second")]
    assert places == sorted(places)


def test_a_table_has_a_row_for_the_header_and_one_for_each_row() -> None:
    """As many cells as columns."""
    tags = Tags(table(["a", "b"], [["1", "2"], ["3", "4"]])).seen
    assert (tags.count("tr"), tags.count("th"), tags.count("td")) == (3, 2, 4)
