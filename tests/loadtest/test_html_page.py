"""Reports are self-contained pages, and plots show the given values."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from loadtest.html_page import (
    PlotAxes,
    PlotsUnavailable,
    Section,
    Series,
    bars,
    cdf,
    dots,
    lines,
    page,
    paragraph,
    table,
    warning,
)

TEXT = "<script>alert('x')</script> & more"


class Tags(HTMLParser):
    """All tags of a document, in order; asserts that they are closed."""

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


def test_text_is_escaped_everywhere() -> None:
    """Policy names, errors and titles come from files and from the network."""
    tags = Tags(whole())
    assert "script" not in tags.seen
    assert whole().count("&lt;script&gt;") == 7
    assert tags.open == []


def test_a_page_is_self_contained() -> None:
    """It loads nothing from the network."""
    assert not re.search(r"""(src|href)=|@import|url\(""", whole())


def test_a_page_follows_the_readers_colour_scheme() -> None:
    """By the system's setting, without a script."""
    assert "prefers-color-scheme: dark" in whole()


def test_sections_and_blocks_keep_their_order() -> None:
    """As passed."""
    document = page("t", [Section("first", ["<p>one</p>", "<p>two</p>"]), Section("second", [])])
    places = [document.index(part) for part in ("<h2>first", "one", "two", "<h2>second")]
    assert places == sorted(places)


def test_a_table_has_a_row_for_the_header_and_one_for_each_row() -> None:
    """With as many cells as columns."""
    tags = Tags(table(["a", "b"], [["1", "2"], ["3", "4"]])).seen
    assert (tags.count("tr"), tags.count("th"), tags.count("td")) == (3, 2, 4)


def test_wide_content_scrolls_within_itself_on_a_narrow_screen() -> None:
    """The page itself does not: tables and plots have a container that scrolls, and names stay in view."""
    document = page("t", [Section("s", [table(["policy", "cached"], [["a", "1"]]), lines(AXES, [ONE])])])
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in document
    assert document.count('<div class="scroll"><table>') == document.count('<div class="scroll"><svg') == 1
    assert ".scroll { overflow-x: auto; }" in document and "position: sticky" in document


AXES = PlotAxes(title="TTFT <p99> & more", x="rate", y="ms", caption="one run")
ONE = Series("cost_aware", [1.0, 2.0], [10.0, 20.0])


def svg_of(figure: str) -> str:
    """The SVG element of a figure."""
    found = re.search(r"<svg.*</svg>", figure, re.DOTALL)
    assert found
    return found.group()


@pytest.mark.parametrize(
    "figure",
    [
        lines(AXES, [ONE]),
        dots(AXES, [ONE]),
        cdf(AXES, {"cost_aware": [1.0, 2.0]}),
        bars(AXES, ["chat", "rag"], {"cost_aware": [0.5, 0.7]}),
    ],
)
def test_a_figure_is_well_formed_and_labelled(figure: str) -> None:
    """Title and caption are escaped text; the SVG parses, names its series and its axes."""
    assert "<strong>TTFT &lt;p99&gt; &amp; more</strong> one run" in figure
    drawn = "".join(ElementTree.fromstring(svg_of(figure)).itertext())
    assert {"cost_aware", "rate", "ms"} <= set(drawn.split())


def test_axes_have_the_pages_text_colour() -> None:
    """In dark mode they are light."""
    assert "currentColor" in lines(AXES, [ONE])
    assert "#010203" not in lines(AXES, [ONE])
    assert "#000000" not in lines(AXES, [ONE])


def test_the_same_values_give_the_same_bytes() -> None:
    """A committed report changes only with its figures."""
    assert lines(AXES, [ONE]) == lines(AXES, [ONE])
    assert lines(AXES, [ONE]) != lines(AXES, [Series("cost_aware", [1.0, 2.0], [10.0, 30.0])])


def test_two_figures_share_no_id() -> None:
    """Ids are global on a page: a plot must not use another plot's clip path."""
    first = set(re.findall(r'\bid="([^"]+)"', lines(AXES, [ONE])))
    second = set(re.findall(r'\bid="([^"]+)"', dots(AXES, [ONE])))
    assert first
    assert not first & second


def test_every_reference_inside_a_figure_has_its_target() -> None:
    """Renaming ids renames the references."""
    figure = lines(AXES, [ONE])
    targets = set(re.findall(r'\bid="([^"]+)"', figure))
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', figure))
    assert references
    assert references <= targets


def test_a_name_with_dollars_is_text_and_no_formula() -> None:
    """Names come from users."""
    assert "$a$" in "".join(ElementTree.fromstring(svg_of(lines(AXES, [Series("$a$", [1.0], [1.0])]))).itertext())


def test_axes_are_drawn_without_data() -> None:
    """A run in which every request failed has a report, too; also on logarithmic axes."""
    log = PlotAxes(title="t", x="x", y="y", log_x=True, log_y=True)
    for figure in (cdf(log, {"a": []}), lines(log, []), dots(log, [Series("a", [], [])]), bars(AXES, [], {})):
        ElementTree.fromstring(svg_of(figure))


@pytest.mark.parametrize(("least", "expected"), [(20.0, {"20", "50", "100", "200"}), (0.01, {"0.1", "1", "10", "100"})])
def test_logarithmic_axes_are_labelled_in_plain_numbers(least: float, expected: set[str]) -> None:
    """Within two decades also between the powers; never as a formula."""
    log = PlotAxes(title="t", x="x", y="y", log_x=True, log_y=True)
    values = [least, 300.0]
    labels = set("".join(ElementTree.fromstring(svg_of(lines(log, [Series("a", values, values)]))).itertext()).split())
    assert expected <= labels
    assert not [label for label in labels if "math" in label]


def test_marks_are_drawn_and_named() -> None:
    """A mark is a line that the legend explains."""
    marked = PlotAxes(title="t", x="x", y="y", across={"ideal": 15.0}, upright={"SLO": 1.5})
    drawn = "".join(ElementTree.fromstring(svg_of(lines(marked, [ONE]))).itertext())
    assert "ideal" in drawn
    assert "SLO" in drawn


def test_many_dots_become_one_picture() -> None:
    """The page of a hundred thousand requests stays small."""
    many = [float(n) for n in range(5000)]
    figure = dots(AXES, [Series("a", many, many)])
    assert "data:image/png" in figure
    assert len(figure) < 200_000


def test_without_matplotlib_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotsUnavailable, match=r"pip install matplotlib"):
        lines(AXES, [ONE])
